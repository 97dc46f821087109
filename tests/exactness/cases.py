"""One case of exactness, run as a plain loop and run as a pipeline, so that the two can be laid side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from exactness.models import Example, example
from torch import Tensor, nn

import penstock
from penstock.runtime.batch.microbatch import split_batch
from penstock.schedule import FAMILIES, Costs, Op, Schedule, build, search

SEED = 11
STEPS = 2
SLOW_HOPS = Costs(forward=1.0, input=1.0, weight=0.5, hop=0.1)
WIDE = tuple(name for name, family in FAMILIES.items() if family.stages_per_rank == 2)


@dataclass(frozen=True)
class Case:
    family: str
    model: str
    ranks: int = 2
    stages: int = 4
    microbatches: int = 4
    rows: int = 8
    optimizer: bool = False  # else the gradients of both steps add up
    recompute: str = "never"
    bfloat16: bool = False

    def __str__(self) -> str:
        then = "optimizer" if self.optimizer else "adding"
        size = f"{self.ranks}r{self.stages}s{self.microbatches}m{self.rows}rows"
        return f"{self.family}-{self.model}-{size}-{then}-{self.recompute}{'-bfloat16' * self.bfloat16}"

    @property
    def schedule(self) -> Schedule:
        return _schedule(self.family, self.ranks, self.microbatches, self.stages, self.model == "skip")

    @property
    def in_order(self) -> bool:
        """Whether each stage adds its gradients in the order of microbatches, as the plain loop does."""
        return _is_in_order(self.family, self.ranks, self.microbatches, self.stages, self.model == "skip")

    @property
    def dtype(self) -> torch.dtype:
        if not self.in_order:
            return torch.float64
        return torch.bfloat16 if self.bfloat16 else torch.float32


@cache
def _schedule(family: str, ranks: int, microbatches: int, stages: int, skips: bool) -> Schedule:
    if family == "steady":  # searched for steps that overlap
        each = stages // ranks
        return search(ranks, microbatches, SLOW_HOPS, ranks, each, "v", objective="steady", effort=40)
    return build(family, ranks, microbatches, stages // ranks, skips=((0, 3),) if skips else ())


@cache
def _is_in_order(family: str, ranks: int, microbatches: int, stages: int, skips: bool) -> bool:
    """Asked for every tensor that is compared."""
    return sums_in_order(_schedule(family, ranks, microbatches, stages, skips))


def sums_in_order(schedule: Schedule) -> bool:
    """Gradients are added in B, or in I (what cannot be put off) and W: each must come microbatch by microbatch."""
    for ops in ((Op.B, Op.I), (Op.B, Op.W)):
        for stage in range(schedule.stages):
            row = schedule.rows[schedule.placement.rank_of(stage)]
            parts = [part for action in row if action is not None for part in action.parts()]
            order = [part.microbatch for part in parts if part.stage == stage and part.op in ops]
            if any(before > after for before, after in pairwise(order)):
                return False
    return True


Outcome = dict[str, Any]  # "losses" and tensors by name


def plain(case: Case) -> Outcome:
    """The truth; the same for every schedule, so it is worked out once."""
    return _plain(case.model, case.stages, case.microbatches, case.rows, case.optimizer, case.dtype)


@cache
def _plain(model: str, stages: int, count: int, rows: int, optimizer: bool, dtype: torch.dtype) -> Outcome:
    made = example(model, stages, rows, dtype)
    whole = nn.ModuleList(made.stages)
    sgd = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9) if optimizer else None
    losses: list[Tensor] = []
    for step in range(STEPS):
        losses += plain_step(made, step, count)
        if sgd is not None:
            sgd.step()
            if step < STEPS - 1:
                sgd.zero_grad()
    return outcome(whole.named_parameters(), whole.named_buffers(), losses)


def plain_step(made: Example, step: int, count: int) -> list[Tensor]:
    """Gradient accumulation over the microbatches, in order, on one device: the loss of each, then of all."""
    batch = split_batch(count, made.args, {}, made.target, {}, {})
    assert batch.rows is not None
    losses, total = [], torch.zeros((), dtype=next(made.stages[0].parameters()).dtype)
    for number in range(count):
        share = batch.rows[number] / sum(batch.rows)
        output = run_stages(made.stages, batch.args[number], step, number)
        loss = made.loss_fn(output, batch.targets[number])
        (loss * share).backward()
        losses.append(loss.detach())
        total = total + loss.detach() * share
    return [*losses, total]


def run_stages(stages: Sequence[nn.Module], args: tuple[Any, ...], step: int, microbatch: int, seed: int = SEED) -> Any:
    """One microbatch through all stages, with the pipeline's random numbers and skips, and nothing else of it."""
    value: Any = args
    skipped: dict[int, Any] = {}
    for number, stage in enumerate(stages):
        inputs = value if isinstance(value, tuple) else (value,)
        inputs += (skipped.pop(number),) if number in skipped else ()
        with penstock.randomness(seed, step, microbatch, number):
            value = stage(*inputs)
        if isinstance(value, penstock.Routed):
            skipped.update(value.to)
            value = value.output
    return value


def pipelined(case: Case, **options: Any) -> Outcome:
    """The same case through a pipeline; on a process, what its rank knows of it."""
    made = example(case.model, case.stages, case.rows, case.dtype)
    pipe = penstock.Pipeline(
        made.stages,
        microbatches=case.microbatches,
        schedule=case.schedule if case.family == "steady" else case.family,
        ranks=case.ranks,
        loss_fn=made.loss_fn,
        cut_options=penstock.CutOptions(skips=made.skips),
        recompute=case.recompute,
        seed=SEED,
        timeout=20,
        **options,
    )
    with pipe:
        assert pipe.schedule == case.schedule
        sgd = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9) if case.optimizer else None
        losses: list[Tensor] = []
        for step in range(STEPS):
            result = pipe.step(*made.args, target=made.target)
            assert result.loss is not None
            losses += [*result.losses, result.loss]
            if sgd is not None:
                sgd.step()
                if step < STEPS - 1:
                    sgd.zero_grad()
        return outcome(pipe.named_parameters(), pipe.named_buffers(), losses)


def all_pipelined(cases: Sequence[Case], transport: str) -> list[Outcome]:
    """For processes: one start, many cases."""
    return [pipelined(case, transport=transport) for case in cases]


def outcome(parameters: Any, buffers: Any, losses: list[Tensor]) -> Outcome:
    found: Outcome = {"losses": torch.stack(losses)}
    for name, parameter in parameters:
        found[f"{name} after"] = parameter.detach().clone()
        found[f"{name} gradient"] = None if parameter.grad is None else parameter.grad.clone()
    found.update({name: buffer.clone() for name, buffer in buffers})
    return found


def differences(case: Case, outcomes: Sequence[Outcome]) -> list[str]:
    """What differs from the plain loop: nothing, if the pipeline is exact. `outcomes`: one per process."""
    wanted = plain(case)
    faults = []
    found: Outcome = {}
    for part in outcomes:
        if not torch.equal(part["losses"], outcomes[0]["losses"]):
            faults.append("ranks were told different losses")
        found.update(part)
    if set(found) != set(wanted):
        faults.append(f"only one of both has {sorted(set(found) ^ set(wanted))}")
    for name in sorted(set(found) & set(wanted)):
        if not _same(found[name], wanted[name], exact=case.in_order):
            faults.append(f"{name}: pipelined {found[name]}, plain {wanted[name]}")
    return faults


def _same(found: Tensor | None, wanted: Tensor | None, exact: bool) -> bool:
    if found is None or wanted is None:
        return found is wanted
    if found.dtype is not wanted.dtype or found.shape != wanted.shape:
        return False
    return torch.equal(found, wanted) if exact else torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)
