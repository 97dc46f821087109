"""Runs one rank's program: a loop and a table.

Everything that can be worked out before the first step is: each action of the program becomes
a function and its two arguments, so that running one costs a call. The executor never asks
which schedule it runs. A user's handler for an op takes the place of the default one.

When something goes wrong on this rank, or news of it comes from another, the rank does not
just stop, because its peers would wait for ever. It walks the rest of its program without
computing: in the place of every message that it owes it sends the failure, and it takes every
message that is due to it off the wire. All ranks thus end the step together, know the cause,
and leave the links clean for the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from logging import DEBUG
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler

from penstock.errors import MessageError, PeerFailure, RunError
from penstock.runtime.batch.comparison import Readers
from penstock.runtime.batch.fingerprint import GivenBatch
from penstock.runtime.engine.action_log import LOG, Entry, log_program, logged
from penstock.runtime.engine.computations import Computations
from penstock.runtime.engine.handlers import Context, Handler
from penstock.runtime.engine.mailbox import ActionWait, Mailbox
from penstock.runtime.engine.recorder import Begun
from penstock.runtime.engine.replication import Replication
from penstock.runtime.engine.report import EndedStep, StepReport, failure_of
from penstock.runtime.engine.stage import Stage
from penstock.runtime.engine.step_input import Refused, StepInput
from penstock.runtime.transport import Transport
from penstock.runtime.transport.channel import Incoming, Outgoing
from penstock.runtime.transport.interrupts import CTRL_C
from penstock.schedule import Action, Op, Schedule, Span

KEPT = 64  # programs that are prepared: batches of many sizes may each have their own
TIMED = frozenset({Op.F, Op.B, Op.I, Op.W, Op.SEND_F, Op.SEND_B})  # a receive is posted in no time


class _PreparedProgram(NamedTuple):
    """What can be worked out about a program before its first step; entries once its channels are open."""

    program: Schedule
    actions: list[Action]
    entries: list[Entry]
    split_backward: frozenset[tuple[int, int]]  # (stage, microbatch) whose backward comes as I and W
    done: str  # where a rank is that has run all of it, in words


class Executor:
    """One rank: its computations, its messages and the programs that it has prepared."""

    def __init__(self, rank: int, stages: Mapping[int, Stage], mailbox: Mailbox, transport: Transport) -> None:
        self.rank = rank
        self.computations = Computations(stages, mailbox)
        self.stages = self.computations.stages
        self.computes: dict[Op, Callable[[int, int], None]] = {
            Op.F: self.computations.forward,
            Op.B: self.computations.backward,
            Op.I: self.computations.backward,
            Op.W: self.computations.weight_gradients,
        }
        self.mailbox = mailbox
        self.replication = Replication()
        self.sampled: GivenBatch | None = None  # what this rank was given for the step
        self.readers: Readers | None = None  # which ranks need an argument of it
        self.transport = transport
        self.handlers: dict[Op, Handler] = {}
        self.context = Context(self)
        self.report = StepReport()
        self._plans: dict[int, _PreparedProgram] = {}
        self.program: Schedule | None = None  # that runs, or ran last
        self._actions: list[Action] = []  # of that program
        self._done = "done with nothing"
        self._position = 0
        self._part: Action | None = None  # the half of a pair that failed
        self._ready = False
        self.running = False  # whoever runs a step says when it is over: some exchange reports first, some do not
        transport.describe_by(self.progress, self.where)

    # -- preparing

    def register(self, op: Op, handler: Handler | None) -> None:
        """Run `handler(action, context)` for every action of that op; None brings the default back."""
        if handler is None:
            self.handlers.pop(op, None)
        else:
            self.handlers[op] = handler
        self._plans.clear()

    def _plan(self, program: Schedule) -> _PreparedProgram:
        plan = self._plans.get(id(program))
        if plan is None or plan.program is not program:
            actions = self._opened([action for action in program.rows[self.rank] if action is not None])
            parts = [part for action in actions for part in action.parts()]
            split_backward = frozenset((part.stage, part.microbatch) for part in parts if part.op is Op.I)
            done = f"done with all {len(actions)} actions, last {actions[-1] if actions else 'nothing'}"
            plan = _PreparedProgram(program, actions, [], split_backward, done)
            while len(self._plans) >= KEPT:
                del self._plans[next(iter(self._plans))]
            self._plans[id(program)] = plan
        return plan

    def _opened(self, actions: list[Action]) -> list[Action]:
        """Open pairs that no handler overlaps: one half, what it made is sent, the other half.

        The send may go before the other half where it stands next in the program: no other rank can tell whether that
        half is done by then.
        """
        opened: list[Action] = []
        rest = deque(actions)
        while rest:
            action = rest.popleft()
            if not action.op.is_pair or action.op in self.handlers:
                opened.append(action)
                continue
            first, second = action.parts()
            opened.append(first)
            while rest and _sends(rest[0], first):
                opened.append(rest.popleft())
            opened.append(second)
        return opened

    def _entry(self, action: Action) -> Entry:
        handler = self.handlers.get(action.op)
        if handler is not None:
            return handler, action, self.context
        return self._default_entry(action)

    def _default_entry(self, action: Action) -> Entry:
        op, stage, microbatch = action.op, action.stage, action.microbatch
        if op.is_transfer:
            channel = self.mailbox.channel(action)
            if op in (Op.SEND_F, Op.SEND_B):
                return Outgoing.send, self.mailbox.ends.sending(channel), microbatch
            return Incoming.post, self.mailbox.ends.receiving(channel), microbatch
        if op.is_pair:
            return self._run_pair, [(part, self._entry(part)) for part in action.parts()], None
        if op.is_sharding:
            return self._shard, action, None
        function = self.computes[op]
        return function, stage, microbatch

    def run_default(self, action: Action) -> None:
        """Run one action as if no handler were registered."""
        function, first, second = self._default_entry(action)
        function(first, second)

    def _run_pair(self, parts: list[tuple[Action, Entry]], _: Any) -> None:
        for part, (function, first, second) in parts:
            try:
                if self.mailbox.waits is not None:
                    self._timed(function, first, second, part)
                else:
                    function(first, second)
            except BaseException:
                self._part = part
                raise

    def _shard(self, action: Action, _: Any) -> None:
        self.replication.act(action)

    # -- the loop

    def run(self, program: Schedule, given: StepInput | Refused, *, record: Begun | None = None) -> EndedStep:
        """One step of this rank, up to where the others are told what came of it; `running` until its caller says so.

        A batch that was refused comes this far, because the peers of its rank must hear of that too.
        """
        computations = self.computations
        self.report = computations.report = StepReport(begun=record)
        self.sampled = self.readers = None
        computations.losses = {}
        plan = self._plan(program)
        self.program = program
        self._actions, self._done, computations.split_backward = plan.actions, plan.done, plan.split_backward
        self._position = 0
        self._part = None
        self._ready = False
        self.running = True
        if self.handlers:
            self.context._begin()
        failure: PeerFailure | None = None
        own: BaseException | None = None
        try:
            if isinstance(given, Refused):
                raise given.error
            self._run_plan(plan, given, record)
        except PeerFailure as error:
            failure = copy(error)  # without the frames that it came through, which hold tensors
        except MessageError as error:
            own, failure = error, self._describe(error)
            self.transport.abort(failure)
        except BaseException as error:  # whatever it is, the peers must hear of it; it is raised again with the reports
            lost = self.replication.explain(error)
            own, failure = error, self._describe(error) if lost is None else lost
        if self.transport.holds_interrupts:
            CTRL_C.end_step()
        try:
            self.report.progress = self._done if failure is None else self.progress()
            if failure is not None:
                with suppress(PeerFailure):  # a peer is lost as well: the exchange will say so
                    self._drain(failure)
            return EndedStep(
                self.transport,
                self.report,
                failure,
                own,
                sampled=self.sampled,
                readers=self.readers,
                computed=self._ready,
                forget=computations.clear,
            )
        finally:
            computations.forget_batch()  # it is the user's to free
            del own, failure, given  # an error that its own frame holds would keep the whole step alive

    def _run_plan(self, plan: _PreparedProgram, given: StepInput, record: Begun | None) -> None:
        """Everything of a step that may fail: the actions of the program one by one, and what they make together."""
        computations = self.computations
        self.sampled, self.readers = given.sampled, given.readers
        computations.begin(given)
        if self.mailbox.open():
            for other in self._plans.values():
                other.entries.clear()
        if not plan.entries:
            plan.entries.extend(map(self._entry, plan.actions))
        self._ready = True
        entries = plan.entries
        if LOG.isEnabledFor(DEBUG):
            log_program(plan.program, self.rank)
            entries = list(logged(self.rank, plan.actions, entries))
        if record or profiler._is_profiler_enabled:  # on any thread of this process
            self._loop_timed(entries, record)
        else:
            news = self.transport.news
            for position, (function, first, second) in enumerate(entries):
                self._position = position
                if news:
                    raise copy(news[0])
                if CTRL_C.since:
                    CTRL_C.raise_held()
                function(first, second)
        self._position = len(entries)
        if self.handlers and (part := self.context._left_out(plan.actions)) is not None:
            self._part = part
            raise RunError(f"a handler did not run {part}; it must call context.run or context.compute for it")
        self.transport.flush()
        if CTRL_C.since:
            CTRL_C.raise_held()
        self.report.ended = perf_counter()
        computations.end_step()

    def _loop_timed(self, plan: list[Entry], record: Begun | None) -> None:
        """The same loop with a label for the profiler and the clock read around each action."""
        self.report.spans = [] if record else None
        self.mailbox.waits = ActionWait()
        try:
            for position, ((function, first, second), action) in enumerate(zip(plan, self._actions, strict=True)):
                self._position = position
                if self.transport.news:
                    raise copy(self.transport.news[0])
                self._timed(function, first, second, action)
        finally:
            self.mailbox.waits = None

    def _timed(self, function: Callable[[Any, Any], Any], first: Any, second: Any, action: Action) -> None:
        """Run one action under its label; a compute or send leaves a span, without the time it waited."""
        outer, waits = self.mailbox.waits, ActionWait()
        self.mailbox.waits = waits
        begin = perf_counter()
        with torch.profiler.record_function(f"penstock {action}"):
            function(first, second)
        if outer is not None:
            outer.add(waits.ended - waits.seconds, waits.ended)
        self.mailbox.waits = outer
        if self.report.spans is not None and (action.op in TIMED or action.op in self.handlers):
            start = begin + waits.seconds  # a handler may wait anywhere; the default code waits first
            if action.op not in self.handlers:
                start = max(begin, waits.ended)
            self.report.spans.append(Span(self.rank, action, start, perf_counter(), waits.seconds))

    # -- one by one

    def compute(self, part: Action) -> None:
        """Run one compute with the default code."""
        function, stage, microbatch = self._default_entry(part)
        try:
            function(stage, microbatch)
        except BaseException:
            self._part = self._part or part  # the other half may fail after it, and because of it
            raise

    # -- failing

    def _describe(self, error: BaseException) -> PeerFailure:
        return failure_of(self.rank, error, self._part or self.where())

    def where(self) -> Action | None:
        """The action that this rank is at, if it is at one; asked for by other threads too."""
        actions, position = self._actions, self._position
        return actions[position] if self.running and self._ready and position < len(actions) else None

    @property
    def computing(self) -> bool:
        """Whether the step that runs has come to its first action."""
        return self._ready

    def progress(self) -> str:
        """Where this rank is in its program; asked for by other threads too."""
        if self.transport.call and not self.running:
            return f"in {self.transport.call}"
        actions, position = self._actions, self._position
        last = actions[position - 1] if 0 < position <= len(actions) else None
        if position >= len(actions):
            return self._done
        waited = self.mailbox.waited_for
        waiting = "" if waited is None else f", waiting for rank {waited[1]} in {waited[0]}"
        return f"at {actions[position]}, last finished {last or 'nothing'}{waiting}"

    def _drain(self, failure: PeerFailure) -> None:
        """Walk the rest of the program without computing, so that no peer waits for this rank."""
        if self.transport.broken is not None:
            return
        if failure.rank == self.rank:
            self.transport.announce(failure)
        if not self._ready:
            self.mailbox.open()
        self.replication.fail(failure)
        ends = self.mailbox.ends
        for position, action in enumerate(self._actions[self._position :], self._position):
            if not action.op.is_transfer:
                for part in action.parts():
                    self.replication.drain(part)
                continue
            channel = self.mailbox.channel(action)
            if action.op in (Op.SEND_F, Op.SEND_B):
                if position > self._position or action.microbatch in ends.sending(channel).ready:
                    self.transport.send_failure(channel, action.microbatch, failure)
            elif action.microbatch not in ends.receiving(channel).posted:
                self.transport.post(channel, action.microbatch)
        for channel, microbatch in self.mailbox.pending:
            self.transport.discard(channel, microbatch)


def _sends(action: Action, made_by: Action) -> bool:
    """Whether an action sends what a computation has made."""
    sent = Op.SEND_F if made_by.op is Op.F else Op.SEND_B
    return action.op is sent and (action.stage, action.microbatch) == (made_by.stage, made_by.microbatch)
