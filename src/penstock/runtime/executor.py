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

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from penstock.errors import MessageError, ModelError, PeerFailure
from penstock.model.split import OUTPUT
from penstock.runtime.losses import Seeds, sum_in_order, own_loss
from penstock.runtime.mailbox import Mailbox
from penstock.runtime.microbatch import Batch
from penstock.runtime.recorder import Begun
from penstock.runtime.stage import LossOf, Stage
from penstock.runtime.transport import Transport
from penstock.runtime.transport.base import with_report
from penstock.schedule import Action, Op, Schedule, Span

__all__ = ["Context", "Executor", "Handler", "StepInput", "StepReport"]

TIMED = frozenset({Op.F, Op.B, Op.I, Op.W, Op.SEND_F, Op.SEND_B})  # a receive is posted in no time


@dataclass
class StepInput:
    """What one step works on, on one rank."""

    batch: Batch
    shares: list[float]  # of each microbatch in the batch's loss
    loss_fn: Callable[..., Any] | None = None
    keep_outputs: bool = False
    training: bool = True
    recompute: frozenset[int] = frozenset()  # microbatches whose forward runs again in the backward


@dataclass
class StepReport:
    """What one rank has to say at the end of a step; every rank gets every rank's."""

    extra: dict[str, float] = field(default_factory=dict)  # named losses, summed over microbatches
    loss: float | None = None  # of the batch, from the rank of the last stage
    losses_by_number: list[float] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    failure: PeerFailure | None = None
    progress: str = ""
    rows: int | None = None  # of the batch that this rank was given
    spans: list[Span] | None = None
    begun: Begun | None = None  # of a step that is recorded
    ended: float = 0.0  # when all was computed and sent


class Context:
    """What a user's handler is given: the step's data, and the default ways to run an action.

    `fetch(action)` waits for what a compute needs; `compute(action)` then runs it, which is
    also safe on another thread or stream beside the other half of an overlapped pair.
    `run(action)` is the default for any action.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    @property
    def rank(self) -> int:
        """This rank."""
        return self._executor.rank

    @property
    def stages(self) -> Mapping[int, torch.nn.Module]:
        """The modules of this rank's stages, by stage."""
        return {index: stage.module for index, stage in self._executor.stages.items()}

    @property
    def batch(self) -> Batch:
        """Arguments, keyword arguments and targets of each microbatch."""
        return self._executor.given.batch

    @property
    def losses(self) -> Mapping[int, Tensor]:
        """The losses so far, by microbatch, on the rank of the last stage."""
        return self._executor.losses

    @property
    def transfers(self) -> tuple[tuple[int, int], ...]:
        """Receives under way: (channel, microbatch), oldest first."""
        return tuple(self._executor.mailbox.pending)

    def fetch(self, action: Action) -> None:
        """Wait until everything that the computes of `action` need is on this rank."""
        for part in action.parts():
            self._executor.fetch(part.op, part.stage, part.microbatch)

    def compute(self, action: Action) -> None:
        """Run the computes of `action`, in order."""
        for part in action.parts():
            self._executor.compute(part)

    def run(self, action: Action) -> None:
        """The default way to run any action."""
        self._executor.run_default(action)


Handler = Callable[[Action, Context], None]
Entry = tuple[Callable[[Any, Any], Any], Any, Any]


class _Plan(NamedTuple):
    """What can be worked out about a program before its first step."""

    program: Schedule
    actions: list[Action]
    entries: list[Entry]
    split: frozenset[tuple[int, int]]  # (stage, microbatch) whose backward comes as I and W


class Executor:
    """One rank: its stages, its mailbox and the programs it has prepared."""

    def __init__(self, rank: int, stages: Mapping[int, Stage], mailbox: Mailbox, transport: Transport) -> None:
        self.rank = rank
        self.stages = dict(stages)
        self.mailbox = mailbox
        self.transport = transport
        self.handlers: dict[Op, Handler] = {}
        self.context = Context(self)
        transport.report_by(self.progress)
        self.given: StepInput
        self.report = StepReport()
        self.losses: dict[int, Tensor] = {}  # by microbatch, on the rank of the last stage
        self._plans: dict[int, _Plan] = {}
        self._split: frozenset[tuple[int, int]] = frozenset()
        self._fetched: dict[tuple[Op, int, int], Any] = {}
        self._outputs: dict[int, Any] = {}
        self._seeds: Seeds
        self._actions: list[Action] = []  # of the program that runs
        self._position = 0
        self._part: Action | None = None  # the half of a pair that failed
        self._ready = False
        self._waited = 0.0
        self._watching = False

    # -- preparing

    def register(self, op: Op, handler: Handler | None) -> None:
        """Run `handler(action, context)` for every action of that op; None brings the default back."""
        if handler is None:
            self.handlers.pop(op, None)
        else:
            self.handlers[op] = handler
        self._plans.clear()

    def _plan(self, program: Schedule) -> _Plan:
        plan = self._plans.get(id(program))
        if plan is None or plan.program is not program:
            actions = [action for action in program.rows[self.rank] if action is not None]
            parts = [part for action in actions for part in action.parts()]
            split = frozenset((part.stage, part.microbatch) for part in parts if part.op is Op.I)
            plan = _Plan(program, actions, [self._entry(action) for action in actions], split)
            self._plans[id(program)] = plan
        return plan

    def _entry(self, action: Action) -> Entry:
        handler = self.handlers.get(action.op)
        if handler is not None:
            return handler, action, self.context
        return self._default(action)

    def _default(self, action: Action) -> Entry:
        op, stage, microbatch = action.op, action.stage, action.microbatch
        if op.is_transfer:
            channel = self.mailbox.channel(action)
            return (self.mailbox.send if op in (Op.SEND_F, Op.SEND_B) else self.mailbox.post), channel, microbatch
        if op.is_pair:
            return self._run_pair, [(part, self._entry(part)) for part in action.parts()], None
        if op.is_sharding:
            return self._nothing, action, None
        computes = {Op.F: self._forward, Op.B: self._backward, Op.I: self._backward, Op.W: self._weight}
        return computes[op], stage, microbatch

    def run_default(self, action: Action) -> None:
        """Run one action as if no handler were registered."""
        function, first, second = self._default(action)
        function(first, second)

    def _run_pair(self, parts: list[tuple[Action, Entry]], _: Any) -> None:
        for part, (function, first, second) in parts:
            try:
                if self._watching:
                    self._watched(function, first, second, part)
                else:
                    function(first, second)
            except BaseException:
                self._part = part
                raise

    def _nothing(self, action: Action, _: Any) -> None:
        """Sharding actions: nothing is sharded unless a handler says so."""

    # -- the loop

    def run(
        self, program: Schedule, given: Callable[[], StepInput], *, record: Begun | None = None
    ) -> list[StepReport]:
        """One step of this rank; returns the reports of all ranks, or raises what went wrong anywhere.

        The batch is asked for here, because its peers must also hear of a rank that was given a wrong one.
        """
        self.report = StepReport(begun=record)
        self.losses = {}
        plan = self._plan(program)
        self._actions, self._split = plan.actions, plan.split
        self._position = 0
        self._part = None
        self._ready = False
        failure: PeerFailure | None = None
        own: BaseException | None = None
        try:
            self._prepare(program, given())
            self.mailbox.open()
            self._ready = True
            if record or profiler._is_profiler_enabled:  # on any thread of this process
                self._loop_watched(plan.entries, record)
            else:
                self._loop(plan.entries)
            self.transport.flush()
            self.report.ended = perf_counter()
            self._sum_losses()
        except PeerFailure as error:
            failure = copy(error)  # without the frames that it came through, which hold tensors
        except MessageError as error:
            own, failure = error, self._describe(error)
            self.transport.abort(failure)
        except BaseException as error:  # whatever it is, the peers must hear of it; it is raised again below
            own, failure = error, self._describe(error)
        try:
            if failure is not None:
                self.report.progress = self.progress()
                with suppress(PeerFailure):  # a peer is lost as well: the exchange will say so
                    self._drain(failure)
            return self._finish(failure, own)
        finally:
            self.__dict__.pop("given", None)  # the batch is the user's to free
            del own, failure  # an error that its own frame holds would keep the whole step alive

    def _prepare(self, program: Schedule, given: StepInput) -> None:
        self.given = given
        self.report.rows = None if given.batch.rows is None else sum(given.batch.rows)
        if given.training:
            self._seeds = Seeds(given.shares)

    def _loop(self, plan: list[Entry]) -> None:
        news = self.transport.news
        for position, (function, first, second) in enumerate(plan):
            self._position = position
            if news:
                raise copy(news[0])
            function(first, second)
        self._position = len(plan)

    def _loop_watched(self, plan: list[Entry], record: Begun | None) -> None:
        """The same loop with a label for the profiler and the clock read around each action."""
        self.report.spans = [] if record else None
        self._watching = True
        try:
            for position, ((function, first, second), action) in enumerate(zip(plan, self._actions, strict=True)):
                self._position = position
                if self.transport.news:
                    raise copy(self.transport.news[0])
                self._watched(function, first, second, action)
        finally:
            self._watching = False
        self._position = len(plan)

    def _watched(self, function: Callable[[Any, Any], Any], first: Any, second: Any, action: Action) -> None:
        """Run one action under its label; a compute or send leaves a span, without the time it waited."""
        self._waited = 0.0
        begin = perf_counter()
        with torch.profiler.record_function(f"penstock {action}"):
            function(first, second)
        if self.report.spans is not None and (action.op in TIMED or action.op in self.handlers):
            self.report.spans.append(Span(self.rank, action, begin + self._waited, perf_counter(), self._waited))

    # -- computing

    def fetch(self, op: Op, stage: int, microbatch: int) -> Any:
        """Wait for what a compute needs, and keep it for that compute."""
        key = (op, stage, microbatch)
        if key not in self._fetched:
            self._fetched[key] = self._await(op, stage, microbatch)

    def _await(self, op: Op, stage: int, microbatch: int) -> Any:
        if self._fetched and (op, stage, microbatch) in self._fetched:
            return self._fetched.pop((op, stage, microbatch))
        if op is Op.W:
            return None
        take = self.mailbox.take_inputs if op is Op.F else self.mailbox.take_gradients
        if not self._watching:
            return take(stage, microbatch)
        begin = perf_counter()
        found = take(stage, microbatch)
        self._waited += perf_counter() - begin
        return found

    def compute(self, part: Action) -> None:
        """Run one compute with the default code."""
        function, stage, microbatch = self._default(part)
        try:
            function(stage, microbatch)
        except BaseException:
            self._part = part
            raise

    def _forward(self, stage: int, microbatch: int) -> None:
        given, owner = self.given, self.stages[stage]
        arrived = self._await(Op.F, stage, microbatch)
        args, kwargs = given.batch.args[microbatch], given.batch.kwargs[microbatch]
        loss_of = self._loss_of(microbatch) if owner.is_last else None
        if not given.training:
            emitted, loss, extra = owner.infer(microbatch, arrived, args, kwargs, loss_of)
        else:
            emitted, loss, extra = owner.forward(
                microbatch,
                arrived,
                args,
                kwargs,
                split=(stage, microbatch) in self._split,
                recompute=microbatch in given.recompute,
                loss_of=loss_of,
            )
        if loss is not None:
            self.losses[microbatch] = loss.detach().clone()  # mse_loss gives a scalar in a storage of the output's size
        for name, value in extra:
            self.report.extra[name] = self.report.extra.get(name, 0.0) + value.detach().item()
        if owner.is_last:
            output = emitted.pop(OUTPUT)
            if given.keep_outputs:
                self._outputs[microbatch] = _detached(output)
        self.mailbox.put_outputs(stage, microbatch, emitted)

    def _loss_of(self, microbatch: int) -> LossOf | None:
        """None in an inference that has nothing to compare with. Without a loss_fn, a scalar output is the loss."""
        given = self.given
        if given.loss_fn is None:
            return own_loss if given.training else _scalar
        if not (given.training or given.batch.has_target):
            return None
        target, extra = given.batch.targets[microbatch], given.batch.loss_kwargs[microbatch]
        return lambda output: given.loss_fn(output, target, **extra)  # type: ignore[misc]

    def _backward(self, stage: int, microbatch: int) -> None:
        """B, or I where the program has an I of this microbatch."""
        split = (stage, microbatch) in self._split
        gradients = self._await(Op.I if split else Op.B, stage, microbatch)
        owner, seeds, seed = self.stages[stage], self._seeds, None
        if owner.is_last and (loss := self.losses.get(microbatch)) is not None:
            seed = seeds.of(microbatch, loss)
        back = owner.backward(microbatch, gradients, split=split, loss_seed=seed, extra_seed=seeds.extra)
        self.mailbox.put_gradients(stage, microbatch, back)

    def _weight(self, stage: int, microbatch: int) -> None:
        self.stages[stage].weights(microbatch)

    def outputs(self) -> list[Any]:
        """The outputs that were kept, in the order of microbatches; forgets them."""
        found, self._outputs = self._outputs, {}
        return [found[number] for number in sorted(found)]

    # -- failing

    def _describe(self, error: BaseException) -> PeerFailure:
        action = self._part
        if action is None and self._ready and self._position < len(self._actions):
            action = self._actions[self._position]
        return PeerFailure(
            self.rank,
            _in_words(error),
            stage=None if action is None else action.stage,
            action=None if action is None else str(action),
            microbatch=None if action is None else action.microbatch,
            original_traceback="".join(traceback.format_exception(error)),
        )

    def progress(self) -> str:
        """Where this rank is in its program; asked for by other threads too."""
        actions, position = self._actions, self._position
        last = actions[position - 1] if 0 < position <= len(actions) else None
        if position >= len(actions):
            return f"done with all {len(actions)} actions, last {last or 'nothing'}"
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
        pending = self.mailbox.pending
        for position, action in enumerate(self._actions[self._position :], self._position):
            if not action.op.is_transfer:
                continue
            channel = self.mailbox.channel(action)
            if action.op in (Op.SEND_F, Op.SEND_B):
                if position > self._position or self.mailbox.owes(channel, action.microbatch):
                    self.transport.send_failure(channel, action.microbatch, failure)
            elif (channel, action.microbatch) not in pending:
                self.transport.post(channel, action.microbatch)
                pending[channel, action.microbatch] = None
        for channel, microbatch in list(pending):
            self.transport.discard(channel, microbatch)

    def _finish(self, failure: PeerFailure | None, own: BaseException | None) -> list[StepReport]:
        self.report.failure = failure
        if failure is None:
            self.report.progress = self.progress()
        try:
            reports: list[StepReport] = self.transport.exchange(self.report)
        except PeerFailure as lost:
            doing = [self.report.progress if rank == self.rank else "no answer" for rank in range(self.transport.ranks)]
            self.clear()
            raise (lost if lost.report else with_report(lost, doing)) from own
        failures = {rank: report.failure for rank, report in enumerate(reports) if report.failure is not None}
        sizes = _different_sizes(reports)
        if not failures and not sizes:
            return reports
        self.clear()
        if not failures:
            raise ModelError(sizes)
        origins = [failed for rank, failed in failures.items() if failed.rank == rank]
        cause = (origins or list(failures.values()))[0]
        doing = [
            report.progress + (f", failed: {failed.cause}" if failed in origins else "")
            for report, failed in zip(reports, map(failures.get, range(len(reports))), strict=True)
        ]
        doing[-1] += f"\n  {sizes}" if sizes else ""
        if own is not None and (not self._ready or isinstance(own, (KeyboardInterrupt, SystemExit))):
            raise own  # a wrong batch is the caller's error, and no rank's failure here
        raise with_report(cause, doing) from own

    def _sum_losses(self) -> None:
        """The batch's loss, for the report."""
        numbers = sorted(self.losses)
        if not numbers:
            return
        losses = torch.stack([self.losses[number] for number in numbers])
        self.report.loss = sum_in_order(losses, [self.given.shares[number] for number in numbers])
        self.report.losses_by_number = losses.tolist()
        self.report.dtype = losses.dtype

    def clear(self) -> None:
        """Forget everything about the step, so that the next one starts clean."""
        self.mailbox.clear()
        self._fetched.clear()
        self._outputs.clear()
        self.losses = {}
        self.report = StepReport()
        self.__dict__.pop("given", None)
        for stage in self.stages.values():
            stage.clear()


def _different_sizes(reports: Sequence[StepReport]) -> str:
    """Batches that are not of one size are not one batch, even where all shapes happen to fit."""
    sizes = {rank: report.rows for rank, report in enumerate(reports) if report.rows is not None}
    if len(set(sizes.values())) < 2:
        return ""
    listed = ", ".join(f"rank {rank}: {rows} rows" for rank, rows in sizes.items())
    return f"the ranks were given batches of different size ({listed}); pass the same batch on every rank"


def _in_words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an error that cannot even be printed must still be told
        return type(error).__name__


def _scalar(output: Any) -> Tensor | None:
    loss = own_loss(output)
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None


def _detached(value: Any) -> Any:
    from torch.utils import _pytree as pytree

    return pytree.tree_map_only(Tensor, Tensor.detach, value)
