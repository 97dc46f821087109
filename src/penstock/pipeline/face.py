"""The face of Penstock: a model, a schedule, and `step`.

A `Pipeline` joins the layers below and adds no mechanism of its own: the model is cut (model), the schedule is built,
lowered and proved (schedule), and its ranks run it (runtime). One training step is: split the batch, run the program
on every local rank, share the losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.group.choose_schedule import choose_schedule
from penstock.group.facts import facts_of
from penstock.group.world import World, collective
from penstock.model.balance.proposal import Proposal
from penstock.model.balance.request import Balancing
from penstock.model.cut import cut_model
from penstock.model.cut_options import CutOptions
from penstock.model.original.wrapped import refuse_wrapped
from penstock.optim.precision import precision_of
from penstock.optim.tied import TiedParameters, tied_places
from penstock.parallel.composition import Composition
from penstock.parallel.parallel_options import ParallelOptions
from penstock.pipeline.arguments import alike, check_arguments, first_count, op_of
from penstock.pipeline.batches import Batches, Call
from penstock.pipeline.deployment import Deployment
from penstock.pipeline.programs import Programs
from penstock.pipeline.rebalance import move_state, propose_cut
from penstock.pipeline.state import ModelState
from penstock.runtime.batch.batch_options import BatchOptions
from penstock.runtime.batch.microbatch import plain_example
from penstock.runtime.batch.result import StepResult
from penstock.runtime.engine.executor import Handler
from penstock.runtime.engine.foreign_leaves import watch_leaves
from penstock.runtime.engine.ranks import LocalRanks
from penstock.runtime.engine.recorder import Begun, Recorder
from penstock.runtime.engine.replication import Alone
from penstock.runtime.engine.report import StepReport
from penstock.runtime.loss.loss_options import LossOptions
from penstock.runtime.loss.module import loss_holding
from penstock.runtime.state.batch_norm import prepare_batch_norm, whole_stages
from penstock.runtime.state.randomness import Clock
from penstock.schedule import Op, Schedule, Timeline, Topology, align
from penstock.schedule.timeline import peaks

__all__ = ["Pipeline", "StepResult"]


class Pipeline:
    """Trains a model cut into stages, by a schedule, on threads of this process or under torchrun."""

    _batches_type = Batches

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        stages: int | None = None,
        microbatches: int | None = None,
        schedule: str | Schedule = "1f1b",
        loss_fn: Callable[..., Any] | None = None,
        example: tuple[Any, ...] | dict[str, Any] | None = None,
        balance: str | Sequence[int] | Mapping[str, float] | None = None,
        split_at: Sequence[str] = (),
        ranks: int | None = None,
        group: Any = None,
        mesh: Any = None,
        devices: Sequence[torch.device | str] | None = None,
        transport: str | None = None,
        recompute: str = "never",
        precision: str | torch.dtype | None = None,
        seed: int | None = None,
        timeout: float = 60.0,
        init: Callable[[str, Tensor], Any] | None = None,
        keep_model: bool = False,
        atomic: bool = False,
        loss_options: LossOptions = LossOptions(),
        batch_options: BatchOptions = BatchOptions(),
        cut_options: CutOptions = CutOptions(),
        parallel_options: ParallelOptions = ParallelOptions(),
    ) -> None:
        given = dict(locals())
        check_arguments(model, given)
        self.recompute, self.atomic = recompute, atomic
        self.composition = composition = Composition(mesh, parallel_options)
        count = first_count(batch_options.split, microbatches, schedule, composition.replicate is not None)
        world = World.find(group, mesh, transport, timeout)
        computes_in = precision_of(precision)
        self._settings = {
            **alike(given),
            "transport": world.way or "no choice",
            "precision": str(computes_in or "the caller's"),
        }

        def choose(topology: Topology, count: int | None) -> Schedule:
            return choose_schedule(schedule, topology, count, ranks, world)

        with world.building():
            group = composition.norm_group(batch_options.batch_norm, batch_options.batch_norm_group)
            prepare_batch_norm(model, batch_options.batch_norm, group)
            measures = world.is_first and composition.is_first
            cut = cut_model(
                model,
                stages,
                balance=Balancing(
                    balance,
                    cut_options.speeds,
                    cut_options.optimizer,
                    schedule_for=lambda stages: choose(Topology.chain(stages), count),
                    agree=lambda numbers: composition.first_says(world.first_says(numbers)),
                    measures=measures,
                ),
                example=plain_example(example),
                split_at=split_at,
                options=cut_options,
            )
            cut = replace(cut, loss=loss_holding(loss_fn, cut))
            chosen = choose(cut.topology, count)
            programs = Programs(
                chosen,
                lambda count: choose(self.deployment.split.topology, count),
                composition.lowered,
                lambda always: whole_stages(cut.parts, always=always),
            )
            refuse_wrapped(cut.parts, programs.schedule)
            clock = Clock(torch.initial_seed() if seed is None else seed)
            places = {rank: torch.device(device) for rank, device in enumerate(devices or ())}
            local = LocalRanks(cut, chosen.placement, world.transports(chosen.ranks, devices), clock, places)
            local.precision = computes_in
            local.keeps_casts = composition.replicate != "fsdp"
            self.deployment = Deployment(world, cut, programs, local, clock, places)
            self.state = ModelState(self.deployment, keep_model)
            self.batches = self._batches_type(
                self.deployment,
                self.state,
                model.forward if isinstance(model, nn.Module) else model[0].forward,
                loss_fn=loss_fn,
                loss_options=loss_options,
                options=batch_options,
                recompute=recompute,
                least=microbatches or 1,
            )
            self.state.materialise(model, init)
            self.deployment.put_on_devices()
            world.agree(self.facts(), clock)
            tied = tied_places(cut)  # before anything takes the place of a parameter
            self.deployment.replicas = composition.build(self, tied)
            world.built()
        local.watch()  # shards, or values for what had none, have taken the place of parameters
        self._tie(tied)
        with world.calling("Pipeline()"):
            self.deployment.tied.make_equal()
        if measures:
            cut.warn()
        self._closed = False
        self._recorder: Recorder | None = None
        self._recorded: Timeline | None = None

    def _tie(self, tied: Sequence[Sequence[tuple[int, str]]]) -> None:
        """What follows from the cut: tied parameters, leaves of other ranks, and what a failed step puts back."""
        deployment = self.deployment
        transport = deployment.world.transport
        deployment.tied = TiedParameters(deployment.split, deployment.placement, transport, tied)
        if transport is not None:
            (executor,) = deployment.ranks.executors.values()
            replicated = deployment.replicas.replicas > 1
            watch_leaves(executor.stages, deployment.split, deployment.placement, self.loss_fn, replicated)
        self._transaction = deployment.ranks.guard(lambda: self.loss_fn, self.atomic)

    def facts(self) -> dict[str, tuple[str, str]]:
        """What every rank must have been given alike."""
        return facts_of(self.schedule, self.deployment.split, self._settings)

    # -- what it is

    @property
    def schedule(self) -> Schedule:
        """The schedule of a training step."""
        return self.deployment.schedule

    @property
    def program(self) -> Schedule:
        """The same with its transfers and reductions: what is run."""
        return self.deployment.programs.program

    @property
    def microbatches(self) -> int:
        """How many microbatches a training step has."""
        return self.deployment.programs.microbatches

    @property
    def rank(self) -> int:
        """This process's rank in the pipeline; 0 where all ranks are threads of this process."""
        return min(self.deployment.ranks.executors)

    @property
    def is_first(self) -> bool:
        """Whether the first stage, which takes the model's inputs, is in this process."""
        return self.deployment.placement.rank_of(0) in self.deployment.ranks.executors

    @property
    def is_last(self) -> bool:
        """Whether the last stage, which has the output and the loss, is in this process."""
        return self.deployment.ranks.last() is not None

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The loss function; another one may be set between steps."""
        return self.batches.loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_fn: Callable[..., Any] | None) -> None:
        self.batches.loss_fn = loss_fn

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
        call = Call("step()", args, kwargs, target, loss_kwargs or {}, outputs, training=True)
        deployment = self.deployment
        self._check_open()
        deployment.ranks.settle()
        self.state.other_ranks.check(deployment)
        deployment.ranks.follow()
        self._take_count(self.batches.take_lengths(call))
        with deployment.world.stepping():
            with self._transaction(training=True, set_aside=deployment.replicas.sets_aside):
                begun = None if self._recorder is None else self._recorder.begin()
                with deployment.tied.summed():
                    reports = self._run(self.program, call, begun)
                deployment.ranks.commit()
                deployment.clock.step += 1
            self.state.other_ranks.let_go(deployment)
            if self._recorder is not None:
                self._recorder.keep(reports)
            return self.batches.result(call, reports)

    def _run(self, program: Schedule, call: Call, record: Begun | None = None) -> list[StepReport]:
        """One program on the local ranks, among the replicas of this pipeline."""
        deployment = self.deployment
        with deployment.replicas.step(program, call.training) as replica:
            with deployment.ranks.step():
                given = self.batches.resolve(call, program.microbatches)
                reports = deployment.ranks.run(program, given, record=record)
            replica.end(reports)
        return reports

    def _take_count(self, count: int | None) -> None:
        """From here on, run that many microbatches, if the batch says how many."""
        if count is not None and self.deployment.programs.take(count) and self._recorder is not None:
            self._recorder.timeline.take(self.schedule, peaks(self.schedule.rows, self.schedule.forward_only))

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
        call = Call("evaluate()", args, kwargs, target, loss_kwargs or {}, outputs, training=False)
        deployment = self.deployment
        self._check_open()
        deployment.ranks.settle()
        deployment.ranks.follow()
        program = deployment.programs.inference(self.batches.count(call), deployment.replicas.lowered)
        with deployment.world.stepping():
            with self._transaction(training=False) as before:
                with deployment.ranks.evaluating(holding.module for holding in deployment.holdings()):
                    reports = self._run(program, call)
                deployment.ranks.give_back()
                before.put_back_buffers()
                deployment.clock.evaluations += 1
            return self.batches.result(call, reports)

    @collective("predict()")
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a batch of any size, on the rank of the last stage (elsewhere None)."""
        return self.evaluate(*args, outputs=True, **kwargs).output

    # -- the model's values in this process, under the model's own names: see `ModelState`

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of the stages that this process owns, each parameter once."""
        return self.state.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """What to give to the optimizer of this process; never empty, because torch's optimizers refuse that."""
        return self.state.parameters()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(name, buffer) of the stages that this process owns, each buffer once."""
        return self.state.named_buffers()

    def parameter_groups(self, rules: Mapping[Any, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Groups for a torch optimizer, by name: `{"*.bias": {"weight_decay": 0.0}}`."""
        return self.state.parameter_groups(rules)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers of the stages that this process owns, and of a loss function that has some."""
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this process's part of a whole model's state; a name that no stage knows is an error."""
        self.state.load_state_dict(state)

    def full_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """The state of the whole model, as a copy on the CPU, on every rank or on one; called on every rank."""
        self._check_open()
        return self.state.full_state_dict(rank)

    def fill_model(self, rank: int | None = None) -> None:
        """Give the model that the pipeline was made of all its values again, until the next step; on every rank."""
        self._check_open()
        self.state.fill_model(rank)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this process's parameters."""
        self.state.zero_grad(set_to_none)

    def grad_norm(self, norm_type: float | str = 2.0, foreach: bool | None = None) -> Tensor:
        """The norm of all gradients of the whole model, the same on every rank; changes nothing."""
        return self.state.grad_norm(norm_type, foreach)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float | str = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale all gradients of the whole model so that their norm is at most `max_norm`; returns the norm."""
        return self.state.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, foreach)

    def clip_grad_value_(self, clip_value: float, foreach: bool | None = None) -> None:
        """Clamp every entry of the gradients to [-clip_value, clip_value]; each rank does its own."""
        self.state.clip_grad_value_(clip_value, foreach)

    def train(self, mode: bool = True) -> Self:
        """Put the model into training mode, or out of it, as its own `train` does."""
        self.state.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model into eval mode."""
        return self.train(False)

    # -- a better cut

    def rebalance(self, timeline: Timeline | None = None) -> Proposal:
        """A better cut from a measured step (by default the last `pipe.record()`), with its gain; changes nothing."""
        return propose_cut(self.deployment.split, self._recorded if timeline is None else timeline)

    @collective("apply()")
    def apply(
        self, proposal: Proposal, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        """Cut as proposed and go on. On every rank; parameters and their state in the optimizer, or in several, move.

        Gradients do not: call it between `optimizer.step()` and the next `step()`.
        """
        if not isinstance(proposal, Proposal):
            raise UsageError(f"proposal={proposal!r}: pass what pipe.rebalance(timeline) gives")
        deployment = self.deployment
        before = deployment.split
        if before.recut is None or not proposal.changes:
            return
        if any(parameter.grad is not None for parameter in self.parameters()):
            raise UsageError("there are gradients; call optimizer.step() and zero_grad() before apply()")
        if type(deployment.replicas) is not Alone:
            raise UsageError("a pipeline with replicas or spread tensors keeps its cut; make a new one with split_at=")
        deployment.ranks.changes.check()
        after = replace(before.recut(proposal.cuts), loss=before.loss)
        schedule = self.schedule.compute().replace(topology=after.topology)
        move_state(before, after, schedule.placement, deployment.world.transport, optimizer)
        deployment.split = after
        deployment.programs = deployment.programs.successor(
            align(schedule), lambda always: whole_stages(after.parts, always=always)
        )
        self.state.other_ranks.moved(deployment)
        self._recorded = None  # it was of the cut before
        deployment.ranks = deployment.ranks.successor(after, schedule.placement)
        deployment.put_on_devices()
        deployment.ranks.watch()
        self._tie(tied_places(after))

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
        shifts, error = self.deployment.world.clock_shifts(self.schedule.ranks)
        held = peaks(self.schedule.rows, self.schedule.forward_only)
        timeline = Timeline(self.schedule, (), held, clock_error=error, unit="s")
        recorder = Recorder(timeline, min(self.deployment.ranks.executors), shifts)
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
        for executor in self.deployment.ranks.executors.values():
            executor.register(which, handler)

    def describe(self) -> str:
        """The table of stages, and how they run."""
        from penstock.view.stages import stage_table

        return stage_table(self)

    def close(self) -> None:
        """End worker threads and connections; the model stays as it is."""
        self._closed = True
        self.deployment.replicas.close()
        self.deployment.ranks.close()

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
