"""What goes into a step on each local rank, and what its reports say: the part of `Pipeline` that is about the batch.

All checks of a batch are made here, while the ranks prepare: a rank that refuses its batch is heard by the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ModelError, UsageError
from penstock.model_state.owned_state import OwnedState
from penstock.runtime.batch.call_arguments import check_call, check_loss_kwargs, positional
from penstock.runtime.batch.fingerprint import Key, Seen, look
from penstock.runtime.batch.lengths import ByTokens, Plan, PlanSplitter, merge_by_plan
from penstock.runtime.batch.microbatch import Batch, check_labels, merge, split_batch
from penstock.runtime.batch.result import StepResult, loss_value
from penstock.runtime.engine.executor import StepInput, StepReport
from penstock.runtime.engine.ranks import Clock
from penstock.runtime.loss.check import LossChecks
from penstock.runtime.loss.losses import trained_loss
from penstock.runtime.loss.shares import BatchShares, Shares, Weighing
from penstock.schedule import Schedule

__all__ = ["Feed", "StepResult"]


class Feed(OwnedState):
    """The part of `Pipeline` that is about the batch."""

    schedule: Schedule
    clock: Clock
    loss_fn: Callable[..., Any] | None
    recompute: str
    loss_reduction: str | None
    loss_weight: Callable[..., Any] | None
    loss_per_microbatch: bool
    weighing: Weighing
    checks: LossChecks
    batch_dims: dict[str | int, Any]
    inputs: str
    atomic: bool
    batch_norm: str
    batching: ByTokens | None = None
    microbatches: int
    _plan: Plan | None = None  # for the batch that runs
    _least: int = 1  # microbatches, where their number follows from the batch
    _checked_keywords: set[frozenset[str]]
    _checked_loss_kwargs: set[frozenset[str]]
    _forward: Callable[..., Any]  # of the model, as the user has written it
    _passed: set[str | int]  # labels of batch_dims that some call has had
    _training = True  # whether the batch that runs is for a step
    _compared: set[bool]  # whether ranks have compared a whole batch, of an evaluation and of a step

    def _inputs(
        self,
        count: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        loss_kwargs: Mapping[str, Any],
        outputs: bool,
        training: bool,
    ) -> dict[int, StepInput]:
        if training:
            self.replicas.ready()  # before anything else can raise: the other copies may wait for its answer
        self._check_values()
        self.crew.changes.check()
        if training:
            self._check_trains()

        def cut(
            args: tuple[Any, ...],
            kwargs: Mapping[str, Any],
            target: Any,
            loss_kwargs: Mapping[str, Any],
            whole: bool = True,
        ) -> Batch:
            if whole:
                self._check_batch(args, kwargs, loss_kwargs)
                if training or target is not None or loss_kwargs:  # else there is no loss: predict()
                    self._check_loss_kwargs(loss_kwargs)
                needs = self.loss_fn if training and self.crew.last() is not None else None
                check_call("step()" if training else "evaluate()", self._forward, args, target, needs)
            return self._cut(count, args, kwargs, target, loss_kwargs, whole)

        given = (args, kwargs, target, loss_kwargs)
        batch = self.world.carry(self, *given, cut) if self.inputs == "first" else cut(*given)
        batches = {rank: _on_device(batch, self.devices.get(rank)) for rank in self.crew.executors}
        shares, check, last = Shares(count, 1.0 / count), None, self.crew.last()
        if last is not None:
            shares = weighed = BatchShares(self.weighing, batch, self.replicas, training)
            if training or batch.has_target or self.loss_fn is None:
                check = self.checks.begin(batches[last.rank], weighed)
        self._training = training
        seen = self._look(*given)
        recomputed = {"never": 0, "except_last": count - 1, "always": count}[self.recompute] if training else 0
        return {
            rank: StepInput(
                own,
                shares,
                trained_loss(self.loss_fn) if training else self.loss_fn,
                keep_outputs=outputs,
                training=training,
                batch_dims=self.batch_dims,
                scale=1.0 if self.scaler is None or not training else self.scaler.loss_scale(),
                check=check,
                recompute=frozenset(range(recomputed)),
                recompute_stages=self.schedule.recompute if training else frozenset(),
                replicas=self.replicas.replicas,
                steps=self.clock.step,
                seen=seen,
                readers=self._readers if self.inputs == "every" else None,
            )
            for rank, own in batches.items()
        }

    def _look(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any, loss_kwargs: Mapping[str, Any]
    ) -> Seen | None:
        """On processes: checksums of what this rank was given; of all numbers until a call of its kind succeeds."""
        transport = self.world.transport
        if transport is None or transport.ranks == 1:
            return None
        return look(args, kwargs, target, loss_kwargs, transport.exchanges, self._training not in self._compared)

    def _readers(self, name: Key) -> set[int]:
        """The ranks whose stages read this argument of a step."""
        parts = self.split.parts
        if name == "target" or isinstance(name, tuple):
            read = [parts[-1]]
        elif isinstance(name, int):
            read = [part for part in parts if part.index == 0 or part.whole_batch]
        else:
            read = [part for part in parts if part.takes is None or name in part.takes]
            read += [parts[-1]] if self.weighing.looks_at(name) else []
        return {self.schedule.placement.rank_of(part.index) for part in read}

    def _cut(
        self,
        count: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        target: Any,
        loss_kwargs: Mapping[str, Any],
        whole: bool = True,
    ) -> Batch:
        """The batch in microbatches: by rows, or by the plan that there is for it."""
        by_plan = None
        if self._plan is not None and self.batching is not None:
            by_plan = PlanSplitter(self._plan, self.batching.sequences, self.batch_dims)
        return split_batch(count, args, kwargs, target, loss_kwargs, self.batch_dims, whole, splitter=by_plan)

    def _planned(
        self, call: str, args: Sequence[Any], kwargs: Mapping[str, Any], loss_kwargs: Mapping[str, Any], training: bool
    ) -> int:
        """How many microbatches lengths make of this batch; all ranks follow the same plan."""
        batching = self.batching
        assert batching is not None
        fixed = training and batching.max_tokens is None
        least = self.microbatches if batching.max_tokens is None else self._least

        def find() -> Plan | None:
            if args or kwargs:
                self._check_keywords(kwargs)
                batching.check_labels(args, [*kwargs, *loss_kwargs], [part.takes for part in self.split.parts])
            return batching.plan(args, kwargs, least, fixed)

        self._plan = self.world.agreed(call, find, "or with different lengths")
        if self._plan is None:
            raise UsageError("by_tokens needs the batch on at least one rank, and none was given one")
        return self._plan.count

    def _result(self, reports: Sequence[StepReport], outputs: bool) -> StepResult:
        self._compared.add(self._training)
        losses: tuple[Tensor, ...] = ()
        for report in reports:
            if report.loss is not None:
                losses = tuple(torch.tensor(report.losses_by_number, dtype=report.dtype).unbind())
        said = self.replicas.said
        sums = [each.loss for each in said if each.loss is not None]
        total = torch.tensor(sum(sums[1:], sums[0]), dtype=said[0].dtype) if sums else None
        extra: dict[str, float] = {}
        for each in said:
            for name, value in each.extra.items():
                extra[name] = extra.get(name, 0.0) + value
        extra = {name: value / sum(each.count for each in said) for name, value in extra.items()}
        last = self.crew.last()
        found = last.outputs() if last is not None else []
        output = self._merged(found) if outputs and found else None
        whole = None if total is None else loss_value(total)
        return StepResult(whole, tuple(map(loss_value, losses)), extra, output)

    def _merged(self, outputs: Sequence[Any]) -> Any:
        """The outputs of all microbatches as one."""
        dim = self.batch_dims.get("output", 0)
        if self._plan is None or self.batching is None:
            return merge(outputs, dim)
        return merge_by_plan(outputs, dim, self._plan, self.batching.sequences.get("output"))

    # -- checks

    def _check_trains(self) -> None:
        """A step that leaves all gradients as they were is a mistake somewhere, and never a training step."""
        if self.schedule.forward_only:
            name = self.schedule.name or "the schedule"
            raise UsageError(f"{name} has no backward, so step() would train nothing; call evaluate() or predict()")
        if not torch.is_grad_enabled():
            raise UsageError(
                "step() was called under torch.no_grad() or inference_mode(); call it outside, or evaluate()"
            )
        if not any(each.requires_grad for holding in self.split.holdings() for each in holding.module.parameters()):
            raise UsageError("no parameter of the model requires grad, so step() would train nothing; call evaluate()")

    def _check_batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_kwargs: Mapping[str, Any]) -> None:
        if not isinstance(loss_kwargs, Mapping):
            raise UsageError(
                f"loss_kwargs is a {type(loss_kwargs).__name__}; pass a dict of loss_fn's keyword arguments"
            )
        self._check_keywords(kwargs)
        if self.batch_dims:
            filled = positional(self.split.parts[0].module.forward)[: len(args)]
            self._passed |= {*range(len(args)), *kwargs, *loss_kwargs, "target", "output"}
            optional = [name for part in self.split.parts for name in part.takes or ()] + positional(self.loss_fn)[2:]
            known = dict.fromkeys([*range(len(args)), *sorted(map(str, [*kwargs, *loss_kwargs])), "target", "output"])
            check_labels(self.batch_dims, list(known), {*self._passed, *optional}.difference(filled))

    def _check_loss_kwargs(self, loss_kwargs: Mapping[str, Any]) -> None:
        if self.loss_fn is not None and frozenset(loss_kwargs) not in self._checked_loss_kwargs:
            check_loss_kwargs(self.loss_fn, list(loss_kwargs))
            self._checked_loss_kwargs.add(frozenset(loss_kwargs))

    def _check_keywords(self, kwargs: Mapping[str, Any]) -> None:
        names = frozenset(kwargs)
        if names in self._checked_keywords:
            return
        for name in sorted(names):
            read = self.weighing.looks_at(name) or (self.batching is not None and self.batching.lengths == name)
            if not read and not any(part.takes is None or name in part.takes for part in self.split.parts):
                known = sorted({known for part in self.split.parts for known in part.takes or ()})
                raise ModelError(
                    f"no stage takes the keyword argument {name!r}; stages take {', '.join(known) or 'none'}"
                )
        self._checked_keywords.add(names)


def _on_device(batch: Batch, device: torch.device | None) -> Batch:
    if device is None or device.type == "cpu":
        return batch

    def move(value: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)

    return Batch(
        move(batch.args), move(batch.kwargs), move(batch.targets), move(batch.loss_kwargs), batch.rows, batch.has_target
    )
