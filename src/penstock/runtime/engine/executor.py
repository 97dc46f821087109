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

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from logging import DEBUG
from time import perf_counter
from traceback import clear_frames
from typing import Any

import torch
from torch.autograd import profiler

from penstock.devices import CPU, on_accelerator
from penstock.errors import MessageError, PeerFailure, RunError
from penstock.runtime.batch.comparison import Readers
from penstock.runtime.batch.fingerprint import FingerprintedBatch
from penstock.runtime.engine.action_log import LOG, log_program, logged
from penstock.runtime.engine.computations import Computations, Mailbox
from penstock.runtime.engine.handlers import Context, Handler
from penstock.runtime.engine.prepared_program import Entry, PreparedProgram, prepare
from penstock.runtime.engine.recorder import ActionWait, DeviceClock, WallStart
from penstock.runtime.engine.replication import Replication
from penstock.runtime.engine.report import EndedStep, StepReport, failure_of, note_steps
from penstock.runtime.engine.stage import Stage, enter_backward
from penstock.runtime.engine.step_input import Refused, StepInput
from penstock.runtime.state.phase import NOW
from penstock.runtime.transport import Transport
from penstock.runtime.transport.channel import ChannelEnds, Incoming, Outgoing
from penstock.runtime.transport.failure.peer_failures import stopped_by_force
from penstock.runtime.transport.interrupts import CTRL_C, CUT, DUE
from penstock.schedule import Action, Op, Schedule, Span

KEPT = 64  # programs that are prepared: batches of many sizes may each have their own
TIMED = frozenset({Op.F, Op.B, Op.I, Op.W, Op.SEND_F, Op.SEND_B})  # a receive is posted in no time


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
        self.fingerprinted: FingerprintedBatch | None = None  # what this rank was given for the step
        self.readers: Readers | None = None  # which ranks need an argument of it
        self.transport = transport
        self.handlers: dict[Op, Handler] = {}
        self.run_by_handlers: set[Action] = set()  # computes, in this step
        self.context = Context(self)
        self._prepared: dict[int, PreparedProgram] = {}
        self.program: Schedule | None = None  # that runs, or ran last
        self._actions: list[Action] = []  # of that program
        self._done = "done with nothing"
        self._position = 0
        self._failed: Action | None = None  # what has failed, where that is a part of the action at this position
        self._ready = False
        self._running = False
        self.device = CPU  # on which its stages are
        self._clock: DeviceClock | None = None  # of a step that is recorded on an accelerator
        transport.describe_by(self.progress, self.where)

    # -- preparing

    def register(self, op: Op, handler: Handler | None) -> None:
        """Run `handler(action, context)` for every action of that op; None brings the default back."""
        if handler is None:
            self.handlers.pop(op, None)
        else:
            self.handlers[op] = handler
        self._prepared.clear()

    def forget_channels(self) -> None:
        """Hold no end of a channel any more, and so no connection."""
        self._prepared.clear()
        self.mailbox.ends = ChannelEnds()

    def _prepare(self, program: Schedule) -> PreparedProgram:
        prepared = self._prepared.get(id(program))
        if prepared is None or prepared.program is not program:
            prepared = prepare(program, self.rank, self.handlers)
            while len(self._prepared) >= KEPT:
                del self._prepared[next(iter(self._prepared))]
            self._prepared[id(program)] = prepared
        return prepared

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
                leaving: Outgoing = self.mailbox.ends.sending(channel)
                return type(leaving).send, leaving, microbatch
            coming: Incoming = self.mailbox.ends.receiving(channel)
            return type(coming).post, coming, microbatch
        if op.is_pair:
            return self._run_pair, [(half, self._entry(half)) for half in action.parts()], None
        if op.is_sharding:
            return self._shard, action, None
        return self.computes[op], stage, microbatch

    # -- the loop

    def run(
        self,
        program: Schedule,
        step_input: StepInput | Refused,
        wall_start: WallStart | None = None,
        *,
        together: bool = False,
    ) -> EndedStep:
        """One step of this rank, up to where the others are told what came of it.

        With `together`, the rank is in the step until it has the reports of all; otherwise it may begin the next one.

        A batch that was refused comes this far, because the peers of its rank must hear of that too.
        """
        prepared, report = self._begin(program, wall_start)
        failure: PeerFailure | None = None
        own: BaseException | None = None
        outer, holds, news = NOW.own, self.transport.holds_interrupts, self.transport.news
        try:
            try:
                try:  # Ctrl-C is raised in here, and no longer where something is made of what was raised.
                    if holds:
                        CTRL_C.go("open")
                    entries = self._make_ready(prepared, step_input, report)
                    for position, (function, first, second) in enumerate(entries):
                        self._position = position
                        if news:
                            raise copy(news[0])
                        if CTRL_C.state is DUE:
                            CTRL_C.raise_due()
                        function(first, second)
                    self._complete(prepared, report)
                finally:
                    if holds:
                        CTRL_C.go("close")
                    if NOW.own is not outer:  # Ctrl-C came as a stage was about to leave its phase.
                        enter_backward(outer)
            except BaseException as error:  # whatever it is, the peers must hear of it; it is raised with the reports
                failure, own = self._explain(error, report)
            if holds and CTRL_C.state is CUT:
                self.transport.abort(stopped_by_force(self.rank))
            return self._end(report, failure, own)
        finally:
            self._running = together
            del own, failure, step_input  # an error that its own frame holds would keep the whole step alive

    def _begin(self, program: Schedule, wall_start: WallStart | None) -> tuple[PreparedProgram, StepReport]:
        """A step begins: nothing of the one before is left here."""
        computations, prepared = self.computations, self._prepare(program)
        report = computations.report = StepReport(wall_start=wall_start)
        self.fingerprinted = self.readers = None
        computations.losses = {}
        self.program = program
        self._actions, self._done = prepared.actions, prepared.done
        computations.split_backward = prepared.split_backward
        self.run_by_handlers.clear()
        self._position, self._failed, self._ready, self._running = 0, None, False, True
        return prepared, report

    def _make_ready(
        self, prepared: PreparedProgram, step_input: StepInput | Refused, report: StepReport
    ) -> Sequence[Entry]:
        """Take the step's input, open the program's channels, and return its actions, ready to run."""
        if isinstance(step_input, Refused):
            raise step_input.error
        computations = self.computations
        self.fingerprinted, self.readers = step_input.fingerprinted, step_input.readers
        computations.begin(step_input)
        if self.mailbox.open():
            for other in self._prepared.values():
                other.entries.clear()
        if not prepared.entries:
            made = [self._entry(action) for action in prepared.actions]
            receives = Counter(map(self.mailbox.channel, filter(_is_receive, prepared.actions)))
            prepared.receives = [(self.mailbox.ends.receiving(channel), count) for channel, count in receives.items()]
            # The last line of these: Ctrl-C may come between any two, and the next step asks for entries alone.
            prepared.entries = made
        self._ready = True
        for end, count in prepared.receives:
            end.expect(count)
        entries = prepared.entries
        if LOG.isEnabledFor(DEBUG):
            log_program(prepared.program, self.rank)
            entries = list(self._logged(entries))
        if report.wall_start or profiler._is_profiler_enabled:  # on any thread of this process
            report.spans = [] if report.wall_start else None
            self._clock = DeviceClock(self.device) if report.wall_start and on_accelerator(self.device) else None
            entries = list(self._timed(entries))
        return entries

    def _complete(self, prepared: PreparedProgram, report: StepReport) -> None:
        """End the program once its last action has run: all has left this rank, and what the actions made is joined."""
        self._position = len(prepared.actions)
        left_out = next((each for each in prepared.for_handlers if each not in self.run_by_handlers), None)
        if left_out is not None:
            self._failed = left_out
            raise RunError(f"a handler did not run {left_out}; it must call context.run or context.compute for it")
        self.transport.flush()
        if CTRL_C.state is DUE:
            CTRL_C.raise_due()
        if report.spans is not None and self._clock is not None:
            report.spans += self._clock.spans(self.rank)
        report.ended = perf_counter()
        self.computations.end_step()

    def _end(self, report: StepReport, failure: PeerFailure | None, own: BaseException | None) -> EndedStep:
        """All that is left of a step to do on this rank, however it went."""
        try:
            report.progress = self._done if failure is None else self.progress()
            if isinstance(own, torch.OutOfMemoryError):
                clear_frames(own.__traceback__)  # which hold the tensors that the memory is full of
                self.computations.free()
                gc.collect()  # an error and its frames hold each other
            if failure is not None:
                with suppress(PeerFailure):  # a peer is lost as well: the exchange will say so
                    self._drain(failure)
            return EndedStep(
                self.transport,
                report,
                failure,
                own,
                fingerprinted=self.fingerprinted,
                readers=self.readers,
                computed=self._ready,
                forget=self.computations.clear,
                leave=self._leave,
            )
        finally:
            self.computations.forget_batch()  # it is the user's to free
            del own, failure  # an error that its own frame holds would keep the whole step alive

    def _leave(self) -> None:
        self._running = False

    # -- actions

    def run_default(self, action: Action) -> None:
        """Run one action as if no handler were registered."""
        function, first, second = self._default_entry(action)
        try:
            function(first, second)
        except BaseException:
            self._failed = self._failed or action  # the other half of a pair may fail after it, and because of it
            raise

    def _run_pair(self, halves: list[tuple[Action, Entry]], _: Any) -> None:
        for half, (function, first, second) in halves:
            try:
                if self.mailbox.waits is not None:
                    self._run_timed(half, function, first, second)
                else:
                    function(first, second)
            except BaseException:
                self._failed = half
                raise

    def _shard(self, action: Action, _: Any) -> None:
        self.replication.act(action)

    def _logged(self, entries: list[Entry]) -> Iterator[Entry]:
        """The same entries; each says what it is before it runs."""
        for position, (action, (function, first, second)) in enumerate(zip(self._actions, entries, strict=True)):
            yield logged(function, f"rank {self.rank}: action {position}, {action}"), first, second

    def _timed(self, entries: list[Entry]) -> Iterator[Entry]:
        """The same entries, with a label for the profiler and the clock read around each."""
        for action, (function, first, second) in zip(self._actions, entries, strict=True):
            yield partial(self._run_timed, action, function), first, second

    def _run_timed(self, action: Action, function: Callable[[Any, Any], Any], first: Any, second: Any) -> None:
        """Run one action under its label; a compute or send leaves a span, without the time it waited."""
        clock = self._clock
        outer, waits = self.mailbox.waits, ActionWait(None if clock is None else clock.mark)
        self.mailbox.waits = waits
        begin, before = perf_counter(), waits.event
        try:
            with torch.profiler.record_function(f"penstock {action}"):
                function(first, second)
        finally:
            self.mailbox.waits = outer
        if outer is not None:
            outer.add(waits.ended - waits.seconds, waits.ended)
        spans = self.computations.report.spans
        if spans is not None and (action.op in TIMED or action.op in self.handlers):
            if clock is not None and before is not None and waits.event is not None:
                clock.add(action, before, waits.event)
                return
            start = begin + waits.seconds  # a handler may wait anywhere; the default code waits first
            if action.op not in self.handlers:
                start = max(begin, waits.ended)
            spans.append(Span(self.rank, action, start, perf_counter(), waits.seconds))

    # -- failing

    def _explain(self, error: BaseException, report: StepReport) -> tuple[PeerFailure, BaseException | None]:
        """Return the failure that the other ranks are told, and the error itself where it is of this rank."""
        if isinstance(error, PeerFailure):
            return copy(error), None  # The copy is without the frames that it came through, which hold tensors.
        if isinstance(error, MessageError):
            note_steps(error, report.steps)
            failure = self._describe(error)
            self.transport.abort(failure)
            return failure, error
        return self.replication.explain(error) or self._describe(error), error

    def _describe(self, error: BaseException) -> PeerFailure:
        return failure_of(self.rank, error, self._failed or self.where())

    def where(self) -> Action | None:
        """The action that this rank is at, if it is at one; asked for by other threads too."""
        actions, position = self._actions, self._position
        return actions[position] if self._running and self._ready and position < len(actions) else None

    @property
    def computing(self) -> bool:
        """Whether the step that runs has come to its first action."""
        return self._ready

    def progress(self) -> str:
        """Where this rank is in its program; asked for by other threads too."""
        if self.transport.call and not self._running:
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
        for channel, microbatch in ends.pending:
            self.transport.discard(channel, microbatch)


def _is_receive(action: Action) -> bool:
    return action.op in (Op.RECV_F, Op.RECV_B)
