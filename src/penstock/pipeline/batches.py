"""What a call of `step` or `evaluate` was given, as what each local rank computes on; and their reports as a result.

All checks of a batch are made in `resolve`. An error there is a value, not yet raised: a rank that refuses its batch
still takes part in the step, so that the other ranks hear of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from penstock.devices import copying
from penstock.errors import ModelError, RunError, UsageError
from penstock.pipeline.arguments import check_call, check_loss_kwargs, positional
from penstock.pipeline.deployment import Deployment
from penstock.pipeline.model_state.carry import carry_batch
from penstock.pipeline.model_state.state import ModelState
from penstock.pipeline.trained_step import APART
from penstock.runtime.batch.batch_options import BatchOptions
from penstock.runtime.batch.fingerprint import FingerprintedBatch, Key, fingerprint_batch
from penstock.runtime.batch.lengths import LengthPlan, PlanSplitter, merge_by_plan
from penstock.runtime.batch.microbatch import Batch, Microbatches, check_is_data, check_labels, count_for, split_batch
from penstock.runtime.batch.outputs import merge
from penstock.runtime.engine.report import StepReport, StepResult, replica_report, result_of
from penstock.runtime.engine.step_input import Refused, StepInput
from penstock.runtime.loss.check import LossCheck
from penstock.runtime.loss.loss_options import LossOptions
from penstock.runtime.loss.losses import trained_loss
from penstock.runtime.loss.shares import BatchShares, Shares, Weighing


@dataclass(frozen=True)
class Call:
    """One call of `step` or `evaluate`, as the user made it."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    loss_kwargs: Mapping[str, Any]
    outputs: bool
    training: bool
    reduce: Callable[..., Any] | None = None  # what predict() makes of the output of each microbatch

    @property
    def is_split(self) -> bool:
        """Whether the user has split the inputs into microbatches."""
        return any(isinstance(value, Microbatches) for value in (*self.args, *self.kwargs.values()))


class Batches:
    """How the batches of one pipeline are split, checked, weighed and put together again."""

    uneven: Callable[[str], None] | None = None  # Called, in place of an error, where losses do not make the batch's.

    def __init__(
        self,
        deployment: Deployment,
        state: ModelState,
        forward: Callable[..., Any],
        *,
        loss_fn: Callable[..., Any] | None,
        loss_options: LossOptions,
        options: BatchOptions,
        recompute: str,
        min_microbatches: int,
    ) -> None:
        self.deployment, self.state = deployment, state
        self.options = options
        self.dims = dict(options.dims)
        self.loss_options = loss_options
        self._forward = forward
        self._recompute = recompute
        self._min_microbatches = min_microbatches  # microbatches, where their number follows from the batch
        self._plan: LengthPlan | None = None  # The plan of the batch that runs.
        self.have_lengths = False  # whether all ranks were given those of the last batch for which they were compared
        self._checked_calls: set[tuple[str, int, bool]] = set()  # name, positional arguments, with a target
        self._checked_keywords: set[frozenset[str]] = set()
        self._checked_loss_kwargs: set[frozenset[str]] = set()
        self._passed: set[str | int] = set()  # labels of `dims` that some call has had
        self._pinned_reads: list[torch.Event] = []  # when devices have read what the user has pinned
        self._compared: set[bool] = set()  # whether ranks have compared a complete batch, of an evaluation, of a step
        self.set_loss(loss_fn)

    def set_loss(self, loss_fn: Callable[..., Any] | None) -> None:
        """Take this loss from here on: how it weighs and is checked follows from it alone."""
        self.loss_fn = loss_fn
        self.weighing = Weighing(loss_fn, self.loss_options, positional(self._forward), self.uneven)
        self.check = LossCheck(self.weighing, self.dims)
        self._checked_calls.clear()
        self._checked_loss_kwargs.clear()

    # -- into microbatches

    def take_lengths(self, call: Call, alone: bool = False) -> int | None:
        """Return the number of microbatches that follows from the lengths in the batch, agreed on by all.

        `alone`: this rank asks nobody. A rank whose lengths are others than those of the other ranks then runs another
        program than they do, which is found out by the first message that they do not agree on.
        """
        if self.options.split is None:
            return None
        return self.deployment.replication.same_count(lambda: self._planned(call, alone))

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """What each microbatch of the batch that runs costs, where their order is to follow from that.

        Replicas reduce their gradients in the order of the schedule, which must then be the same for all of them.
        """
        if self._plan is None or self.options.order == "given" or self.deployment.replication.replicas > 1:
            return None
        return self._plan.tokens

    def count(self, call: Call) -> int:
        """Return how many microbatches an evaluation of this batch has, agreed on by all ranks that see it."""
        deployment = self.deployment
        planned = self.take_lengths(call)
        if planned is not None:
            return planned

        def wanted() -> int | None:
            self._check_keywords(call.kwargs)
            return count_for(deployment.programs.microbatches, call.args, call.kwargs, call.target, self.dims)

        def agreed() -> int:
            found, _ = deployment.world.same_on_all(call.name, wanted, "(rank, microbatches)")
            return deployment.programs.microbatches if found is None else found

        return deployment.replication.same_count(agreed)

    def resolve(self, call: Call, count: int) -> dict[int, StepInput] | Refused:
        """Return what each local rank computes on, or why it cannot: the error that all ranks must hear."""
        try:
            return self._resolve(call, count)
        except BaseException as error:  # raised again by the rank that runs, once its peers have heard of it
            return Refused(error)

    def _resolve(self, call: Call, count: int) -> dict[int, StepInput]:
        deployment, training = self.deployment, call.training
        ranks, replicas = deployment.ranks, deployment.replication
        if training:
            if not replicas.is_alone:
                replicas.ready()  # Nothing may raise before it: the other copies may wait for its answer.
            if deployment.counter.is_apart:
                raise RunError(APART)
        if self.state.without_values:
            self.state.check_values()
        ranks.changes.check()
        if training:
            self._check_trains()
        batch = self._carried(call, count) if self.options.inputs == "first" else self._checked(call, count)
        batches = {rank: self._on_device(batch, rank) for rank in ranks.executors}
        begin_check = None
        if ranks.last is None or call.reduce is not None:
            shares = Shares(count, 1.0 / count)
        else:
            shares = weighed = BatchShares(self.weighing, batch, replicas, training)
            if training or batch.has_target or self.loss_fn is None:
                begin_check = partial(self.check.begin, batches[ranks.last.rank], weighed, training)
        fingerprinted = self._fingerprint(call)
        recomputed = {"never": 0, "except_last": count - 1, "always": count}[self._recompute] if training else 0
        scaler = self.state.scaler if training else None
        return {
            rank: StepInput(
                own,
                shares,
                trained_loss(self.loss_fn) if training else call.reduce or self.loss_fn,
                join=(Microbatches if call.reduce and call.is_split else self._merged) if call.outputs else None,
                reduce=call.reduce,
                training=training,
                batch_dims=self.dims,
                scale=1.0 if scaler is None else scaler.loss_scale(),
                begin_check=begin_check,
                recompute=frozenset(range(recomputed)),
                recompute_stages=deployment.programs.schedule.recompute if training else frozenset(),
                replicas=replicas.replicas,
                steps=deployment.counter.step,
                fingerprinted=fingerprinted,
                readers=self._readers if self.options.inputs == "every" else None,
            )
            for rank, own in batches.items()
        }

    def _checked(self, call: Call, count: int) -> Batch:
        self._check_call(call)
        return self._split(count, call)

    def _carried(self, call: Call, count: int) -> Batch:
        """Send, for inputs='first', what later ranks need straight from the first stage's rank."""
        return carry_batch(
            self.deployment.world.transport,
            self.deployment.placement,
            call,
            lambda: self._checked(call, count),
            lambda part: self._split(count, part, whole=False),
            self._needed_by,
        )

    def _needed_by(self, call: Call, rank: int) -> tuple[Any, ...]:
        args = call.args if any(rank in self._readers(place) for place in range(len(call.args))) else ()
        kwargs = {name: value for name, value in call.kwargs.items() if rank in self._readers(name)}
        return (args, kwargs, call.target, dict(call.loss_kwargs)) if self._is_last(rank) else (args, kwargs, None, {})

    def _is_last(self, rank: int) -> bool:
        return self.deployment.placement.rank_of(self.deployment.staged.stages - 1) == rank

    def _on_device(self, batch: Batch, rank: int) -> Batch:
        device = self.deployment.devices.get(rank)
        if device is None:
            return batch

        def moved(named: Iterable[tuple[Any, Any]]) -> Iterator[Any]:
            return (copied(value) if rank in self._readers(name) else value for name, value in named)

        with copying(device, self._pinned_reads) as copied:
            args = [tuple(moved(enumerate(each))) for each in batch.args]
            kwargs = [dict(zip(each, moved(each.items()), strict=True)) for each in batch.kwargs]
            targets, loss_kwargs = batch.targets, batch.loss_kwargs
            if self._is_last(rank):
                targets, loss_kwargs = copied((targets, loss_kwargs))
        return Batch(args, kwargs, targets, loss_kwargs, batch.rows, batch.has_target)

    def give_back(self) -> None:
        """Wait until devices have read the batch: in pinned memory, the user may write the next one to its place."""
        while self._pinned_reads:
            read = self._pinned_reads.pop()
            if not read.query():
                read.synchronize()

    def _fingerprint(self, call: Call) -> FingerprintedBatch | None:
        """Checksum what this rank was given, on processes: all numbers until a call of its kind succeeds."""
        transport = self.deployment.world.transport
        if transport is None or transport.ranks == 1:
            return None
        complete = call.training not in self._compared
        return fingerprint_batch(call.args, call.kwargs, call.target, call.loss_kwargs, transport.exchanges, complete)

    def _readers(self, name: Key) -> set[int]:
        """Return the ranks whose stages, or the weighing of whose losses, read this argument of a step."""
        parts = self.deployment.staged.parts
        if name == "target" or isinstance(name, tuple):
            read = [parts[-1]]
        elif isinstance(name, int):
            read = [part for part in parts if part.index == 0 or part.reads_inputs]
        else:
            read = [part for part in parts if part.takes is None or name in part.takes]
        if not isinstance(name, tuple) and self.weighing.looks_at(name):
            read.append(parts[-1])
        return {self.deployment.placement.rank_of(part.index) for part in read}

    def microbatches_of(self, call: Call) -> Batch:
        count = self.take_lengths(call)
        if count is not None:
            self.deployment.programs.take(count)
        return self._split(self.deployment.programs.microbatches, call)

    def _split(self, count: int, call: Call, *, whole: bool = True) -> Batch:
        by_plan = None
        if self._plan is not None and self.options.split is not None:
            by_plan = PlanSplitter(self._plan, self.options.split.sequences, self.dims)
        given = (call.args, call.kwargs, call.target, call.loss_kwargs)
        return split_batch(count, *given, self.dims, whole, splitter=by_plan)

    def _planned(self, call: Call, alone: bool) -> int:
        """Return how many microbatches lengths make of this batch; all ranks follow the same plan."""
        by_tokens, deployment = self.options.split, self.deployment
        assert by_tokens is not None
        fixed = call.training and by_tokens.max_tokens is None
        least = deployment.programs.microbatches if by_tokens.max_tokens is None else self._min_microbatches

        def find() -> LengthPlan | None:
            if call.args or call.kwargs:
                self._check_keywords(call.kwargs)
                takes = [part.takes for part in deployment.staged.parts]
                by_tokens.check_labels(call.args, [*call.kwargs, *call.loss_kwargs], takes)
            return by_tokens.plan(call.args, call.kwargs, least, fixed)

        if alone:
            self._plan = find()
        else:
            self._plan, self.have_lengths = deployment.world.same_on_all(call.name, find, "or with different lengths")
        if self._plan is None:
            where = "every rank, as in the step before" if alone else "at least one rank"
            raise UsageError(f"by_tokens needs the batch on {where}, and none was given{' here' if alone else ''}")
        return self._plan.count

    @property
    def has_compared(self) -> bool:
        """Whether the ranks have compared a complete batch of a step."""
        return True in self._compared

    # -- and back

    def result(self, call: Call, reports: Sequence[StepReport], count: int) -> StepResult:
        """Return what the user gets, from the reports of all ranks on so many microbatches."""
        self._compared.add(call.training)
        last = self.deployment.ranks.last
        output = last.computations.outputs.take() if call.outputs and last is not None else None
        replicas = self.deployment.replication.replica_reports or [replica_report(reports, count)]
        return result_of(reports, replicas, output)

    def _merged(self, outputs: Sequence[Any]) -> Any:
        dim = self.dims.get("output", 0)
        if self._plan is None or self.options.split is None:
            return merge(outputs, dim)
        return merge_by_plan(outputs, dim, self._plan, self.options.split.sequences.get("output"))

    # -- checks

    def _check_trains(self) -> None:
        """Refuse a step that leaves all gradients as they were: it is a mistake somewhere, and never training."""
        schedule = self.deployment.programs.schedule
        if schedule.forward_only:
            name = schedule.name or "the schedule"
            raise UsageError(f"{name} has no backward, so step() would train nothing; call evaluate() or predict()")
        if not torch.is_grad_enabled():
            raise UsageError(
                "step() was called under torch.no_grad() or inference_mode(); call it outside, or evaluate()"
            )
        stages = [stage for executor in self.deployment.ranks.executors.values() for stage in executor.stages.values()]
        if any(each.requires_grad for stage in stages for each in stage.module.parameters()):
            return
        holdings = self.deployment.staged.holdings()  # other ranks may train
        if not any(each.requires_grad for holding in holdings for each in holding.module.parameters()):
            raise UsageError("no parameter of the model requires grad, so step() would train nothing; call evaluate()")

    def _check_call(self, call: Call) -> None:
        args, kwargs, loss_kwargs = call.args, call.kwargs, call.loss_kwargs
        if not isinstance(loss_kwargs, Mapping):
            raise UsageError(
                f"loss_kwargs is a {type(loss_kwargs).__name__}; pass a dict of loss_fn's keyword arguments"
            )
        self._check_keywords(kwargs)
        if call.training:
            check_is_data(args, kwargs, call.target, loss_kwargs)
        if self.dims:
            filled = positional(self.deployment.staged.parts[0].module.forward)[: len(args)]
            self._passed |= {*range(len(args)), *kwargs, *loss_kwargs, "target", "output"}
            optional = [name for part in self.deployment.staged.parts for name in part.takes or ()]
            optional += positional(self.loss_fn)[2:]
            known = dict.fromkeys([*range(len(args)), *sorted(map(str, [*kwargs, *loss_kwargs])), "target", "output"])
            check_labels(self.dims, list(known), {*self._passed, *optional}.difference(filled))
        has_loss = call.reduce is None and (call.training or call.target is not None or loss_kwargs)
        if has_loss and self.loss_fn is not None and frozenset(loss_kwargs) not in self._checked_loss_kwargs:
            check_loss_kwargs(self.loss_fn, list(loss_kwargs))
            self._checked_loss_kwargs.add(frozenset(loss_kwargs))
        needs = self.loss_fn if call.training and self.deployment.ranks.last is not None else None
        shape = (call.name, len(args), call.target is not None)
        without_target = needs is not None and call.target is None
        if shape not in self._checked_calls or without_target or any(isinstance(each, Mapping) for each in args):
            check_call(call.name, self._forward, args, call.target, needs)
            self._checked_calls.add(shape)

    def _check_keywords(self, kwargs: Mapping[str, Any]) -> None:
        names = frozenset(kwargs)
        if names in self._checked_keywords:
            return
        for name in sorted(names):
            read = self.weighing.looks_at(name) or (
                self.options.split is not None and self.options.split.lengths == name
            )
            if not read and not any(part.takes is None or name in part.takes for part in self.deployment.staged.parts):
                known = sorted({known for part in self.deployment.staged.parts for known in part.takes or ()})
                raise ModelError(
                    f"no stage takes the keyword argument {name!r}; stages take {', '.join(known) or 'none'} (what "
                    f"loss_fn needs goes by target= or in loss_kwargs={{...}})"
                )
        self._checked_keywords.add(names)
