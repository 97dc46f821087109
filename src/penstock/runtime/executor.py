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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from penstock.errors import MessageError, PeerFailure
from penstock.model.split import OUTPUT
from penstock.runtime.mailbox import Mailbox
from penstock.runtime.microbatch import Batch
from penstock.runtime.stage import Stage
from penstock.runtime.transport import Transport
from penstock.schedule import Action, Op, Schedule, Span

__all__ = ["Context", "Executor", "Handler", "StepInput", "StepReport"]


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
    spans: list[Span] | None = None


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


class Executor:
    """One rank: its stages, its mailbox and the programs it has prepared."""

    def __init__(self, rank: int, stages: Mapping[int, Stage], mailbox: Mailbox, transport: Transport) -> None:
        self.rank = rank
        self.stages = dict(stages)
        self.mailbox = mailbox
        self.transport = transport
        self.handlers: dict[Op, Handler] = {}
        self.context = Context(self)
        self.given: StepInput
        self.report = StepReport()
        self.losses: dict[int, Tensor] = {}  # by microbatch, on the rank of the last stage
        self._plans: dict[int, tuple[Schedule, list[Entry]]] = {}
        self._split: frozenset[tuple[int, int]] = frozenset()
        self._fetched: dict[tuple[Op, int, int], Any] = {}
        self._outputs: dict[int, Any] = {}
        self._seeds: list[Tensor] = []
        self._extra_seed: Tensor | None = None
        self._position = 0
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

    def _plan(self, program: Schedule) -> list[Entry]:
        known = self._plans.get(id(program))
        if known is not None and known[0] is program:
            return known[1]
        entries = [self._entry(action) for action in program.rows[self.rank] if action is not None]
        self._plans[id(program)] = (program, entries)
        return entries

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
            return self._run_pair, action, None
        if op.is_sharding:
            return self._nothing, action, None
        return {Op.F: self._forward, Op.B: self._backward, Op.I: self._input, Op.W: self._weight}[op], stage, microbatch

    def run_default(self, action: Action) -> None:
        """Run one action as if no handler were registered."""
        function, first, second = self._default(action)
        function(first, second)

    def _run_pair(self, action: Action, _: Any) -> None:
        for part in action.parts():
            function, first, second = self._entry(part)
            if self._watching:
                self._watched(function, first, second, part)
            else:
                function(first, second)

    def _nothing(self, action: Action, _: Any) -> None:
        """Sharding actions: nothing is sharded unless a handler says so."""

    # -- the loop

    def run(self, program: Schedule, given: StepInput, *, record: bool = False) -> list[StepReport]:
        """One step of this rank; returns the reports of all ranks, or raises what went wrong anywhere."""
        self.given = given
        self.report = StepReport()
        self.losses = {}
        plan = self._plan(program)
        self._prepare(program, given)
        failure: PeerFailure | None = None
        own: BaseException | None = None
        try:
            self.mailbox.open()
            if record or torch._C._autograd._profiler_enabled():
                self._loop_watched(plan, program, record)
            else:
                self._loop(plan)
            self.transport.flush()
        except PeerFailure as error:
            failure = error
        except MessageError as error:
            own, failure = error, self._describe(error, program)
            self.transport.abort(failure)
        except BaseException as error:  # whatever it is, the peers must hear of it; it is raised again below
            own, failure = error, self._describe(error, program)
        if failure is not None:
            self._drain(program, failure)
        return self._finish(program, failure, own)

    def _prepare(self, program: Schedule, given: StepInput) -> None:
        if given.training:
            self._seeds = [torch.tensor(share) for share in given.shares]
            self._extra_seed = torch.tensor(1.0 / program.microbatches)
            self._split = frozenset(
                (part.stage, part.microbatch)
                for action in program.rows[self.rank]
                if action is not None
                for part in action.parts()
                if part.op is Op.I
            )
        self._position = 0

    def _loop(self, plan: list[Entry]) -> None:
        for position, (function, first, second) in enumerate(plan):
            self._position = position
            function(first, second)
        self._position = len(plan)

    def _loop_watched(self, plan: list[Entry], program: Schedule, record: bool) -> None:
        """The same loop with a label for the profiler and the clock read around each action."""
        actions = [action for action in program.rows[self.rank] if action is not None]
        self.report.spans = [] if record else None
        self._watching = True
        try:
            for position, ((function, first, second), action) in enumerate(zip(plan, actions, strict=True)):
                self._position = position
                self._watched(function, first, second, action)
        finally:
            self._watching = False
        self._position = len(plan)

    def _watched(self, function: Callable[[Any, Any], Any], first: Any, second: Any, action: Action) -> None:
        """Run one action under its label; a compute leaves a span, without the time it waited."""
        self._waited = 0.0
        begin = perf_counter()
        with torch.profiler.record_function(f"penstock {action}"):
            function(first, second)
        if self.report.spans is not None and (action.op.is_compute or action.op in self.handlers):
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
        take = self.mailbox.take_inputs if op is Op.F else self.mailbox.take_gradients
        if not self._watching:
            return take(stage, microbatch) if op is not Op.W else None
        begin = perf_counter()
        found = take(stage, microbatch) if op is not Op.W else None
        self._waited += perf_counter() - begin
        return found

    def compute(self, part: Action) -> None:
        """Run one compute with the default code."""
        function, stage, microbatch = self._default(part)
        function(stage, microbatch)

    def _forward(self, stage: int, microbatch: int) -> None:
        given, owner = self.given, self.stages[stage]
        arrived = self._await(Op.F, stage, microbatch)
        args, kwargs = given.batch.args[microbatch], given.batch.kwargs[microbatch]
        if not given.training:
            emitted = owner.infer(microbatch, arrived, args, kwargs)
            if owner.is_last:
                self._infer_last(microbatch, emitted.pop(OUTPUT))
        else:
            emitted, loss, extra = owner.forward(
                microbatch,
                arrived,
                args,
                kwargs,
                split=(stage, microbatch) in self._split,
                recompute=microbatch in given.recompute,
                loss_of=self._loss_of(microbatch) if owner.is_last else None,
            )
            if loss is not None:
                self.losses[microbatch] = loss.detach()
            for name, value in extra:
                self.report.extra[name] = self.report.extra.get(name, 0.0) + value.detach().item()
            if owner.is_last:
                output = emitted.pop(OUTPUT)
                if given.keep_outputs:
                    self._outputs[microbatch] = _detached(output)
        self.mailbox.put_outputs(stage, microbatch, emitted)

    def _infer_last(self, microbatch: int, output: Any) -> None:
        if self.given.loss_fn is not None and self.given.batch.has_target:
            with torch.no_grad():
                self.losses[microbatch] = self._loss_of(microbatch)(output)
        if self.given.keep_outputs:
            self._outputs[microbatch] = _detached(output)

    def _loss_of(self, microbatch: int) -> Callable[[Any], Any]:
        given = self.given
        if given.loss_fn is None:
            return lambda output: output
        target, extra = given.batch.targets[microbatch], given.batch.loss_kwargs[microbatch]
        return lambda output: given.loss_fn(output, target, **extra)  # type: ignore[misc]

    def _backward(self, stage: int, microbatch: int) -> None:
        self._go_back(Op.B, stage, microbatch)

    def _input(self, stage: int, microbatch: int) -> None:
        self._go_back(Op.I, stage, microbatch)

    def _go_back(self, op: Op, stage: int, microbatch: int) -> None:
        gradients = self._await(op, stage, microbatch)
        loss = self.losses.get(microbatch)
        seed = None
        if loss is not None and self.stages[stage].is_last:
            seed = self._seeds[microbatch].to(loss)
        back = self.stages[stage].backward(
            microbatch, gradients, split=op is Op.I, loss_seed=seed, extra_seed=self._extra_seed
        )
        self.mailbox.put_gradients(stage, microbatch, back)

    def _weight(self, stage: int, microbatch: int) -> None:
        self.stages[stage].weights(microbatch)

    def outputs(self) -> list[Any]:
        """The outputs that were kept, in the order of microbatches; forgets them."""
        found, self._outputs = self._outputs, {}
        return [found[number] for number in sorted(found)]

    # -- failing

    def _describe(self, error: BaseException, program: Schedule) -> PeerFailure:
        actions = [action for action in program.rows[self.rank] if action is not None]
        action = actions[self._position] if self._position < len(actions) else None
        return PeerFailure(
            self.rank,
            f"{type(error).__name__}: {error}",
            stage=None if action is None else action.stage,
            action=None if action is None else str(action),
            microbatch=None if action is None else action.microbatch,
            original_traceback="".join(traceback.format_exception(error)),
        )

    def _progress(self, program: Schedule) -> str:
        actions = [action for action in program.rows[self.rank] if action is not None]
        last = actions[self._position - 1] if self._position else None
        if self._position >= len(actions):
            return f"had finished all {len(actions)} actions, last {last}"
        return f"at {actions[self._position]}, last finished {last or 'nothing'}"

    def _drain(self, program: Schedule, failure: PeerFailure) -> None:
        """Walk the rest of the program without computing, so that no peer waits for this rank."""
        actions = [action for action in program.rows[self.rank] if action is not None]
        self.report.progress = self._progress(program)
        pending = self.mailbox.pending
        for position, action in enumerate(actions[self._position :], self._position):
            if not action.op.is_transfer:
                continue
            channel = self.mailbox.channel(action)
            if action.op in (Op.SEND_F, Op.SEND_B):
                self.transport.send_failure(channel, action.microbatch, failure)
            elif (channel, action.microbatch) not in pending:
                if position > self._position:
                    self.transport.post(channel, action.microbatch)
                pending[channel, action.microbatch] = None
        for channel, microbatch in list(pending):
            self.transport.discard(channel, microbatch)

    def _finish(self, program: Schedule, failure: PeerFailure | None, own: BaseException | None) -> list[StepReport]:
        self.report.failure = failure
        if failure is None:
            self._sum_losses()
        if not self.report.progress:
            self.report.progress = self._progress(program)
        try:
            reports: list[StepReport] = self.transport.exchange(self.report)
        except PeerFailure as lost:
            self.clear()
            raise lost from own
        failures = [report.failure for report in reports if report.failure is not None]
        if not failures:
            return reports
        self.clear()
        lines = [f"  rank {rank}: {report.progress}" for rank, report in enumerate(reports)]
        origins = [failed for rank, report in enumerate(reports) if (failed := report.failure) and failed.rank == rank]
        cause = (origins or failures)[0]
        cause.report = "what each rank was doing:\n" + "\n".join(lines)
        told = PeerFailure(*_parts(cause)[0], **_parts(cause)[1])
        if isinstance(own, (KeyboardInterrupt, SystemExit)):
            raise own
        raise told from own

    def _sum_losses(self) -> None:
        """The batch's loss, summed in the order of microbatches as a plain loop would."""
        numbers = sorted(self.losses)
        if not numbers:
            return
        losses = [self.losses[number] for number in numbers]
        total = losses[0] * self.given.shares[numbers[0]]
        for number, loss in zip(numbers[1:], losses[1:], strict=True):
            total = total + loss * self.given.shares[number]
        self.report.loss = total.item()
        self.report.losses_by_number = torch.stack(losses).tolist()
        self.report.dtype = total.dtype

    def clear(self) -> None:
        """Forget everything about the step, so that the next one starts clean."""
        self.mailbox.clear()
        self._fetched.clear()
        self._outputs.clear()
        for stage in self.stages.values():
            stage.clear()


def _parts(failure: PeerFailure) -> tuple[tuple[Any, ...], dict[str, Any]]:
    _, (rank, cause, details) = failure.__reduce__()
    return (rank, cause), details


def _detached(value: Any) -> Any:
    from torch.utils import _pytree as pytree

    return pytree.tree_map_only(Tensor, Tensor.detach, value)
