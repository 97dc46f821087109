"""The face of Penstock: a model, a schedule, and `step`.

A `Pipeline` joins the layers below and adds nothing of its own to what they do: the model is
cut (model), the schedule is built, lowered and proved (schedule), and its ranks run it (runtime).
One training step is: split the batch, run the program on every local rank, share the losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.group.choose_schedule import choose_schedule
from penstock.group.world import World, collective
from penstock.model.balance.proposal import Proposal
from penstock.model.balance.request import Balancing
from penstock.model.cut import cut_model
from penstock.model.wrapped import refuse_wrapped
from penstock.model_state.other_ranks import Elsewhere
from penstock.model_state.rebalance import move_state, propose_cut
from penstock.optim.precision import precision_of
from penstock.optim.tied import TiedParameters, tied_places
from penstock.options.arguments import check_arguments, op_of
from penstock.parallel.composition import Composition
from penstock.runtime.backward.foreign_leaves import watch_leaves
from penstock.runtime.batch.batching import Batching
from penstock.runtime.batch.call_arguments import positional
from penstock.runtime.batch.feed import StepResult
from penstock.runtime.batch.lengths import ByTokens
from penstock.runtime.batch.microbatch import count_for, plain_example
from penstock.runtime.engine.executor import Handler, StepInput
from penstock.runtime.engine.ranks import Clock, Crew
from penstock.runtime.engine.recorder import Recorder
from penstock.runtime.engine.replication import Alone
from penstock.runtime.loss.check import LossChecks
from penstock.runtime.loss.module import loss_holding
from penstock.runtime.loss.shares import Weighing
from penstock.runtime.state.batch_norm import prepare_batch_norm, whole_stages
from penstock.schedule import Op, Schedule, Timeline, Topology, align, verify
from penstock.schedule.builders import forward_program
from penstock.schedule.gather import gather, in_turn
from penstock.schedule.timeline import peaks

__all__ = ["Pipeline", "StepResult"]


class Pipeline(Batching):
    """Trains a model cut into stages, by a schedule, on threads of this process or under torchrun."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        microbatches: int | None = None,
        stages: int | None = None,
        schedule: str | Schedule = "1f1b",
        loss_fn: Callable[..., Any] | None = None,
        example: tuple[Any, ...] | dict[str, Any] | None = None,
        balance: str | Sequence[int] | Mapping[str, float] | None = None,
        speeds: Sequence[float] | None = None,
        optimizer: str = "adamw",
        split: str | ByTokens = "auto",
        split_at: Sequence[str] = (),
        skips: Iterable[tuple[int, int]] = (),
        ranks: int | None = None,
        group: Any = None,
        mesh: Any = None,
        replicate: str | None = None,
        window: int | None = None,
        shard_precision: Any = None,
        tensor_plan: Any = None,
        transport: str | None = None,
        devices: Sequence[torch.device | str] | None = None,
        recompute: str = "never",
        precision: str | torch.dtype | None = None,
        batch_norm: str = "microbatch",
        batch_norm_group: Any = None,
        loss_reduction: str | None = None,
        loss_weight: Callable[..., Any] | None = None,
        loss_per_microbatch: bool = False,
        init: Callable[[str, Tensor], Any] | None = None,
        batch_dims: Mapping[str | int, Any] | None = None,
        inputs: str = "every",
        seed: int | None = None,
        keep_model: bool = False,
        atomic: bool = False,
        timeout: float = 60.0,
    ) -> None:
        check_arguments(model, locals())
        self._elsewhere = Elsewhere(keep_model)
        self.loss_fn = loss_fn
        self.recompute = recompute
        self.batch_norm = batch_norm
        self.loss_reduction = loss_reduction
        self.loss_weight = loss_weight
        self.loss_per_microbatch = loss_per_microbatch
        self._forward = model.forward if isinstance(model, nn.Module) else model[0].forward
        self.weighing = Weighing(loss_fn, loss_weight, loss_reduction, loss_per_microbatch, positional(self._forward))
        self.batch_dims = dict(batch_dims or {})
        self.checks = LossChecks(loss_fn, self.weighing, self.batch_dims, loss_per_microbatch)
        self.inputs = inputs
        self.atomic = atomic
        self._named = (schedule, ranks)
        self.composition = Composition(mesh, replicate, window, shard_precision, tensor_plan)
        replicated = self.composition.replicate is not None
        split, microbatches = self._by_length(split, microbatches, replicated)
        self.world = world = World.find(group, mesh, transport, timeout)
        with world.building():

            def schedule_for(count: int) -> Schedule:
                return choose_schedule(schedule, Topology.chain(count), microbatches, ranks, world)

            prepare_batch_norm(model, batch_norm, self.composition.norm_group(batch_norm, batch_norm_group))

            def measured(numbers: list[float]) -> list[float]:
                return self.composition.first_says(world.first_says(numbers))

            measures = world.is_first and self.composition.is_first
            balancing = Balancing(balance, speeds, optimizer, schedule_for, measured, measures)
            self.split = cut_model(
                model,
                stages,
                balance=balancing,
                skips=skips,
                example=plain_example(example),
                split_at=split_at,
                split=split,
            )
            self.split = replace(self.split, loss=loss_holding(loss_fn, self.split))
            self._prove(choose_schedule(schedule, self.split.topology, microbatches, ranks, world))
            refuse_wrapped(self.split.parts, self.schedule)
            transports = world.transports(self.schedule.ranks, devices)
            self.devices = {rank: torch.device(device) for rank, device in enumerate(devices or ())}
            self.clock = Clock(torch.initial_seed() if seed is None else seed)
            self.crew = Crew(self.split, self.schedule.placement, transports, self.clock, self.devices)
            self.crew.precision = precision_of(precision)
            self.crew.keeps_casts = self.composition.replicate != "fsdp"
            self._without_values = self._materialise(model, init)
            self._put_on_devices()
            world.agree(self)
            places = tied_places(self.split)  # before anything takes the place of a parameter
            self.replicas = self.composition.build(self, places)
            world.built()
        self.crew.watch()  # shards, or values for what had none, have taken the place of parameters
        self.tied = TiedParameters(self.split, self.schedule.placement, world.transport, places)
        with world.calling("Pipeline()"):
            self.tied.make_equal()
        self._watch_leaves()
        if measures:
            self.split.warn()
        self._checked_keywords, self._checked_loss_kwargs = set(), set()
        self._passed = set()
        self._compared = set()
        self._closed = False
        self._recorder: Recorder | None = None
        self._recorded: Timeline | None = None
        self._transaction = self.crew.guard(lambda: self.loss_fn, atomic)

    def _prove(self, schedule: Schedule) -> None:
        """Take a schedule: lowered, and proved to end, before anything runs."""
        whole = whole_stages(self.split.parts)
        self.schedule = in_turn(schedule, whole)
        self.program = gather(self.composition.lowered(self.schedule), whole)
        verify(self.program)
        self.microbatches = schedule.microbatches
        self._inference: dict[int, Schedule] = {}
        self._proved = {self.microbatches: (self.schedule, self.program)}

    def _watch_leaves(self) -> None:
        if self.world.transport is not None:
            (executor,) = self.crew.executors.values()
            replicated = self.replicas.replicas > 1
            watch_leaves(executor.stages, self.split, self.schedule.placement, self.loss_fn, replicated)

    # -- training

    @collective("step()")
    def step(
        self,
        *args: Any,
        target: Any = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Forward and backward of one batch; gradients are added to `.grad` as `backward()` does."""

        def given() -> dict[int, StepInput]:
            return self._inputs(self.microbatches, args, kwargs, target, loss_kwargs or {}, outputs, training=True)

        self._check_open()
        self.crew.settle()
        self._elsewhere.check(self)
        self.crew.follow()
        if self.batching is not None:
            self._take(
                self.replicas.same_count(
                    lambda: self._planned("step()", args, kwargs, loss_kwargs or {}, training=True)
                )
            )
        with self.world.stepping():
            with self._transaction(training=True, set_aside=self.replicas.sets_aside):
                begun = None if self._recorder is None else self._recorder.begin()
                with self.tied.summed():
                    reports = self.replicas.run(
                        self.program, lambda: self.crew.run(self.program, given, record=begun), training=True
                    )
                self.crew.commit()
                self.clock.step += 1
            self._elsewhere.let_go(self)
            if self._recorder is not None:
                self._recorder.keep(reports)
            return self._result(reports, outputs)

    # -- inference

    @collective("evaluate()")
    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """The loss of a batch of any size, in eval mode, touching nothing that training uses."""

        def wanted() -> int | None:
            self._check_keywords(kwargs)
            return count_for(self.microbatches, args, kwargs, target, self.batch_dims)

        def given() -> dict[int, StepInput]:
            return self._inputs(count, args, kwargs, target, loss_kwargs or {}, outputs, training=False)

        self._check_open()
        self.crew.settle()
        self.crew.follow()
        if self.batching is None:
            count = self.replicas.same_count(lambda: self.world.same_count(self, wanted))
        else:
            count = self.replicas.same_count(
                lambda: self._planned("evaluate()", args, kwargs, loss_kwargs or {}, training=False)
            )
        program = self._inference.get(count)
        if program is None:
            gathered = gather(forward_program(self.schedule, count), whole_stages(self.split.parts, always=True))
            program = self._inference[count] = self.replicas.lowered(gathered)
        with self.world.stepping():
            with self._transaction(training=False) as before:
                with self.crew.evaluating(holding.module for holding in self.holdings()):
                    reports = self.replicas.run(program, lambda: self.crew.run(program, given), training=False)
                self.crew.give_back()
                before.put_back_buffers()
                self.clock.evaluations += 1
            return self._result(reports, outputs)

    @collective("predict()")
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch of any size, on the rank of the last stage (elsewhere None)."""
        return self.evaluate(*args, outputs=True, **kwargs).output

    # -- a better cut

    def rebalance(self, timeline: Timeline | None = None) -> Proposal:
        """A better cut from a measured step (by default the last `pipe.record()`), with its gain; changes nothing."""
        return propose_cut(self, self._recorded if timeline is None else timeline)

    @collective("apply()")
    def apply(
        self, proposal: Proposal, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        """Cut as proposed and go on. On every rank; parameters and their state in the optimizer, or in several, move.

        Gradients do not: call it between `optimizer.step()` and the next `step()`.
        """
        if not isinstance(proposal, Proposal):
            raise UsageError(f"proposal={proposal!r}: pass what pipe.rebalance(timeline) gives")
        if self.split.recut is None or not proposal.changes:
            return
        if any(parameter.grad is not None for parameter in self.parameters()):
            raise UsageError("there are gradients; call optimizer.step() and zero_grad() before apply()")
        if type(self.replicas) is not Alone:
            raise UsageError("a pipeline with replicas or spread tensors keeps its cut; make a new one with split_at=")
        self.crew.changes.check()
        before, after = self.split, replace(self.split.recut(proposal.cuts), loss=self.split.loss)
        schedule = self.schedule.compute().replace(topology=after.topology)
        move_state(before, after, schedule.placement, self.world.transport, optimizer)
        self.split = after
        self._prove(align(schedule))
        self._elsewhere.moved(self)
        self._recorded = None  # it was of the cut before
        self.crew = self.crew.successor(after, schedule.placement)
        self._put_on_devices()
        self.crew.watch()
        self._transaction = self.crew.guard(lambda: self.loss_fn, self.atomic)
        self.tied = TiedParameters(after, schedule.placement, self.world.transport, tied_places(after))
        self._watch_leaves()

    # -- looking at it

    @contextmanager
    def record(self) -> Iterator[Timeline]:
        """Measure the steps inside, on every rank: the timeline holds all ranks' spans of the last of them.

        With two steps or more inside, what the optimizer and the loop took between them is measured too; without
        one, it stays empty.
        """
        self._check_open()
        if self._recorder is not None:
            raise UsageError("this pipeline is in a record() already; they do not nest: use the outer one's timeline")
        shifts, error = self.world.clock_shifts(self.schedule.ranks)
        held = peaks(self.schedule.rows, self.schedule.forward_only)
        timeline = Timeline(self.schedule, (), held, clock_error=error, unit="s")
        recorder = Recorder(timeline, min(self.crew.executors), shifts)
        self._recorder = recorder
        try:
            with recorder.watching():
                yield timeline
        finally:
            self._recorder = None
        self._recorded = timeline
        if recorder.silent:
            raise UsageError(f"rank {recorder.silent[0]} did not record the step; enter pipe.record() on every rank")

    def register(self, op: Op | str, handler: Handler | None) -> None:
        """Run `handler(action, context)` for every action of that op; None restores the default."""
        which = op_of(op)
        if handler is not None and not callable(handler):
            raise UsageError(f"handler={handler!r}: pass a function of (action, context), or None for the default")
        for executor in self.crew.executors.values():
            executor.register(which, handler)

    def describe(self) -> str:
        """The table of stages, and how they run."""
        from penstock.view.stages import stage_table

        return stage_table(self)

    def close(self) -> None:
        """End worker threads and connections; the model stays as it is."""
        self._closed = True
        self.replicas.close()
        self.crew.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this pipeline is closed; make a new one from the same model to go on")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a Pipeline has threads and connections, and cannot be copied or pickled; save its state_dict(), or copy "
            "the model and make another Pipeline of it"
        )

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
