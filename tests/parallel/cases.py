"""A case of composition: one pipeline of several replicas, and the plain loop over the whole batch in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from exactness.cases import SEED, STEPS, WIDE, run_stages, sums_in_order
from exactness.models import Example, example
from torch import Tensor, nn

import penstock
from penstock.runtime.batch.microbatch import split_batch
from penstock.schedule import build

M = 4  # microbatches of a replica

Outcome = dict[str, Any]


@dataclass(frozen=True)
class Case:
    family: str
    replicate: str = "ddp"
    model: str = "transformer"
    optimizer: bool = False  # else the gradients of both steps add up
    rows: tuple[int, ...] = (8, 8)  # of each replica's batch
    window: int | None = None
    pp: int = 2

    def __str__(self) -> str:
        then = "optimizer" if self.optimizer else "adding"
        rows = "+".join(map(str, self.rows))
        return f"{self.family}-{self.replicate}-{self.model}-{rows}rows-window{self.window}-{then}"

    @property
    def stages(self) -> int:
        return self.pp * (2 if self.family in WIDE else 1)

    @property
    def in_order(self) -> bool:
        return sums_in_order(build(self.family, self.pp, M, self.stages // self.pp))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.in_order else torch.float64

    def made(self) -> Example:
        return made(self.model, self.stages, sum(self.rows), self.dtype)


def made(model: str, stages: int, rows: int, dtype: torch.dtype) -> Example:
    if model in ("tied", "unused"):
        found = example("transformer", stages, rows, dtype)
        if model == "tied":
            tie(found.stages)
        else:
            found.stages[-1] = Unused(found.stages[-1], dtype)
        return found
    return example(model, stages, rows, dtype)


def tie(stages: Sequence[Any]) -> None:
    """The table of the first stage is the head of the last; and, if there are two between, these share a norm."""
    stages[-1].head.weight = stages[0].table.weight
    if len(stages) > 2:
        stages[-1].norm = stages[1].first


class Unused(nn.Module):
    """One layer that nothing uses, one that only some batches use, and one scalar."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.never, self.sometimes = nn.Linear(3, 2).to(dtype), nn.Linear(20, 20).to(dtype)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=dtype))
        for parameter in (*self.never.parameters(), *self.sometimes.parameters()):
            nn.init.constant_(parameter, 0.125)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * self.scale
        return out + self.sometimes(out) if x.shape[0] % 2 else out


def slices(value: Any, rows: Sequence[int], replica: int) -> Any:
    first = sum(rows[:replica])
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf[first : first + rows[replica]] if isinstance(leaf, Tensor) else leaf, value
    )


def plain(case: Case) -> Outcome:
    """One process, the whole batch: each replica's microbatches in order, then the sum over replicas."""
    made = case.made()
    whole = nn.ModuleList(made.stages)
    sgd = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9) if case.optimizer else None
    losses = []
    for step in range(STEPS):
        losses.append(plain_step(made, case, step, list(whole.parameters())))
        if sgd is not None:
            sgd.step()
            if step < STEPS - 1:
                sgd.zero_grad()
    return outcome(whole.named_parameters(), losses)


def plain_step(made: Example, case: Case, step: int, parameters: list[nn.Parameter]) -> Tensor:
    before = [parameter.grad for parameter in parameters]
    total = torch.zeros((), dtype=case.dtype)
    sums: list[Tensor | None] = [None] * len(parameters)
    for replica, rows in enumerate(case.rows):
        for parameter in parameters:
            parameter.grad = None
        args, target = slices((made.args, made.target), case.rows, replica)
        own = torch.zeros((), dtype=case.dtype)  # a loss is the sum of the replicas' sums, not of all in a row
        batch = split_batch(M, args, {}, target, {}, {})
        assert batch.rows is not None
        assert sum(batch.rows) == rows
        for number in range(M):
            share = batch.rows[number] / sum(case.rows)
            loss = made.loss_fn(
                run_stages(made.stages, batch.args[number], step, replica * M + number), batch.targets[number]
            )
            (loss * share).backward()
            own = own + loss.detach().cpu() * share
        total = total + own
        sums = [_plus(one, parameter.grad) for one, parameter in zip(sums, parameters, strict=True)]
    for parameter, earlier, added in zip(parameters, before, sums, strict=True):
        parameter.grad = _plus(earlier, added)
    return total


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def outcome(parameters: Any, losses: list[Tensor]) -> Outcome:
    found: Outcome = {"losses": torch.stack(losses)}
    for name, parameter in parameters:
        found[name] = whole_of(parameter.detach()).clone()
        found[f"{name}.grad"] = None if parameter.grad is None else whole_of(parameter.grad).clone()
    return found


def whole_of(tensor: Tensor) -> Tensor:
    """Of a sharded tensor, all of it."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def pipelined(case: Case, mesh: Any, **options: Any) -> Outcome:
    made = case.made()
    if dist.get_rank():  # only the first process has the true values: replicas must take them over
        for module in made.stages:
            for parameter in module.parameters():
                if mesh.get_local_rank("dp"):
                    nn.init.zeros_(parameter)
    replica = mesh.get_local_rank("dp")
    with penstock.Pipeline(
        made.stages,
        microbatches=M,
        schedule=case.family,
        loss_fn=made.loss_fn,
        cut_options=penstock.CutOptions(skips=made.skips),
        mesh=mesh,
        parallel_options=penstock.ParallelOptions(replicate=case.replicate, window=case.window),
        seed=SEED,
        timeout=30,
        **options,
    ) as pipe:
        sgd = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9) if case.optimizer else None
        losses = []
        args, target = slices((made.args, made.target), case.rows, replica)
        for step in range(STEPS):
            result = pipe.step(*args, target=target)
            assert result.loss is not None
            losses.append(result.loss)
            pipe.evaluate(*args, target=target)  # between steps, in the middle of adding up: nothing is lost
            if sgd is not None:
                sgd.step()
                if step < STEPS - 1:
                    sgd.zero_grad()
        return outcome(pipe.named_parameters(), losses)


def differences(case: Case, outcomes: Sequence[Outcome]) -> list[str]:
    """What differs from the plain loop; all replicas must agree bit for bit."""
    wanted, faults = plain(case), []
    # tied copies are summed rank by rank, and of three replicas the backend chooses which two it adds first
    exact = case.in_order and case.model != "tied" and len(case.rows) == 2
    found: Outcome = {}
    for part in outcomes:
        for name, value in part.items():
            name = untied(name, case)
            if name in found and not same(found[name], value, exact=True):
                faults.append(f"{name}: ranks differ")
            found.setdefault(name, value)
    if set(found) != set(wanted):
        faults.append(f"only one of both has {sorted(set(found) ^ set(wanted))}")
    for name in sorted(set(found) & set(wanted)):
        if not same(found[name], wanted[name], exact=exact):
            faults.append(f"{name}: pipelined {found[name]}, plain {wanted[name]}")
    return faults


def untied(name: str, case: Case) -> str:
    """On processes a tied parameter has, on each rank, a name of a stage there."""
    if case.model == "tied":
        last = case.stages - 1
        name = name.replace(f"{last}.head.weight", "0.table.weight")
        if last > 1:
            name = name.replace(f"{last}.norm.", "1.first.")
    return name


def same(found: Tensor | None, wanted: Tensor | None, exact: bool) -> bool:
    if found is None or wanted is None:
        return found is wanted
    if found.dtype is not wanted.dtype or found.shape != wanted.shape:
        return False
    if exact:
        return torch.equal(found, wanted)
    close = 1e-12 if found.dtype is torch.float64 else 1e-6
    return torch.allclose(found, wanted, rtol=close, atol=close)


def all_pipelined(cases: Sequence[Case]) -> list[Outcome]:
    mesh = penstock.mesh(pp=cases[0].pp, dp=len(cases[0].rows))
    return [pipelined(case, mesh) for case in cases]
