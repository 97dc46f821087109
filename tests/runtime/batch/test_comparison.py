"""Ranks of a pipeline that were given different batches are refused, whatever the difference is in, in any step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F
from transports import ON_PROCESSES

import penstock
from penstock.errors import PenstockError
from penstock.runtime.batch.comparison import left_out

RANKS, M, ROWS, WIDTH = 3, 2, 6, 4
LAST = RANKS - 1


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.layer(x)
        return x if mask is None else x * mask


class Last(nn.Module):
    """Has its labels among the keyword arguments, as models of transformers do; a target goes to a loss_fn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> Tensor:
        x = self.layer(x) * scale
        return x if labels is None else F.mse_loss(x, labels)


def weighed(output: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return weight * F.mse_loss(output, target)


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH), Middle(), Last()]


def batch(rows: int = ROWS, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, labels = torch.randn(2, rows, WIDTH, generator=generator)
    return {"x": x, "labels": labels, "mask": (x > 0).float(), "other": x + 1}


def nan_in(values: Tensor) -> Tensor:
    values = values.clone()
    values[-1, -1] = torch.nan
    return values


Given = tuple[tuple[Any, ...], dict[str, Any]]
MODEL: dict[str, Callable[[int, dict[str, Tensor]], Given]] = {  # whose output is the loss
    "good": lambda rank, b: ((b["x"],), {"labels": b["labels"], "mask": b["mask"]}),
    "rows of its own": lambda rank, b: (
        (batch(seed=rank)["x"],),
        {"labels": batch(seed=rank)["labels"], "mask": b["mask"]},
    ),
    "x on a rank that does not read it": lambda rank, b: (
        (b["other"] if rank == LAST else b["x"],),
        {"labels": b["labels"], "mask": b["mask"]},
    ),
    "mask on the first": lambda rank, b: (
        (b["x"],),
        {"labels": b["labels"], "mask": 1 - b["mask"] if rank == 0 else b["mask"]},
    ),
    "plain value": lambda rank, b: (
        (b["x"],),
        {"labels": b["labels"], "mask": b["mask"], "scale": 2.0 if rank == 1 else 1.0},
    ),
    "no mask where it is read": lambda rank, b: (
        (b["x"],),
        {"labels": b["labels"], **({} if rank == 1 else {"mask": b["mask"]})},
    ),
    "rounded differently": lambda rank, b: (
        (b["x"] * (1 + rank * 1e-6),),
        {"labels": b["labels"], "mask": b["mask"]},
    ),
    "only what each reads": lambda rank, b: (
        (b["x"],) if rank == 0 else (),
        [{}, {"mask": b["mask"]}, {"labels": b["labels"]}][rank],
    ),
}
LOSS: dict[str, Callable[[int, dict[str, Tensor]], Given]] = {
    "good": lambda rank, b: ((b["x"],), {"target": b["labels"]}),
    "target": lambda rank, b: ((b["x"],), {"target": b["other"] if rank == 1 else b["labels"]}),
    "nan": lambda rank, b: ((b["x"],), {"target": nan_in(b["labels"]) if rank == LAST else b["labels"]}),
    "loss_kwargs": lambda rank, b: (
        (b["x"],),
        {"target": b["labels"], "loss_kwargs": {"weight": 1.0 + (rank == 0)}},
    ),
    "loss_kwargs elsewhere": lambda rank, b: (
        (b["x"],),
        {"target": b["labels"], "loss_kwargs": {} if rank == LAST else {"weight": 2.0}},
    ),
    "target of the last alone": lambda rank, b: ((b["x"],), {"target": b["labels"] if rank == LAST else None}),
    "more rows on the first": lambda rank, b: (
        (batch(ROWS + 2)["x"] if rank == 0 else b["x"],),
        {"target": batch(ROWS + 2)["labels"] if rank == 0 else b["labels"]},
    ),
}


def attempt(call: Callable[..., Any], given: Given) -> str:
    args, kwargs = given
    try:
        return f"loss {call(*args, **kwargs).loss.item():.6f}"
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"


def run_all(first: str) -> dict[str, list[str]]:
    """Each case in the first step of a pipeline where it is the one named, and in a later one."""
    rank, found = dist.get_rank(), {}
    for kind, cases, loss_fn in (("model", MODEL, None), ("loss", LOSS, weighed)):
        for way in ON_PROCESSES:
            pipe = penstock.Pipeline(stages(), microbatches=M, loss_fn=loss_fn, transport=way, timeout=30.0)
            if first in cases:
                found[f"first {first} {way}"] = [attempt(pipe.step, cases[first](rank, batch()))]
            for name, case in cases.items():
                if way == "distributed" and name != first:
                    continue
                said = [attempt(pipe.step, cases["good"](rank, batch())), attempt(pipe.step, case(rank, batch()))]
                said.append(attempt(pipe.evaluate, case(rank, batch())))
                found[f"{kind}: {name} {way}"] = said
            pipe.close()
    return found


@pytest.mark.slow
def test_any_difference_is_refused_on_all_ranks_in_any_step() -> None:
    told = on_processes(RANKS, run_all, "rows of its own")
    assert all(each == told[0] for each in told), told  # the same words on every rank
    found = told[0]
    fine = {"good", "rounded differently", "only what each reads", "target of the last alone"}
    good = found["model: good shared"][0], found["loss: good shared"][0]
    for name, said in found.items():
        if name.startswith("first"):
            assert said[0].startswith("ModelError: the ranks were given different batches (argument 0: rank 0 has"), (
                said
            )
            continue
        assert said[0] in good  # whatever was refused before it
        case = name.split(": ")[1].rsplit(" ", 1)[0]
        for each in said[1:]:
            assert each.startswith("loss ") if case in fine else each.startswith("ModelError: "), (name, each)
    assert (
        "argument 0: ranks 0 and 1 have float32 (6, 4) with "
        in found["model: x on a rank that does not read it shared"][1]
    )
    assert "'mask': rank 0 has float32 (6, 4) with " in found["model: mask on the first shared"][1]
    assert "'scale': ranks 0 and 2 have float with 1; rank 1 has float with 2)" in found["model: plain value shared"][1]
    assert (
        "rank 0 was given 'mask' and rank 1, which reads it, was not"
        in found["model: no mask where it is read shared"][1]
    )
    assert "'target': ranks 0 and 2 have float32" in found["loss: target shared"][1]
    assert "; rank 2 has float32 (6, 4) with nan)" in found["loss: nan shared"][1]
    assert "loss_kwargs['weight']: rank 0 has float with 2; ranks 1 and 2 have" in found["loss: loss_kwargs shared"][1]
    assert (
        "rank 0 was given loss_kwargs['weight'] and rank 2, which reads it, was not"
        in found["loss: loss_kwargs elsewhere shared"][1]
    )
    rows = found["loss: more rows on the first shared"][1]
    assert "batches of different size (rank 0: 8 rows, rank 1: 6 rows, rank 2: 6 rows)" in rows
    assert "in this step, rank 2 failed" in rows  # where it surfaced


def test_what_one_rank_was_given_by_position_and_another_by_name_is_there_on_both() -> None:
    told: list[Any] = [(True, {0: 1, 1: 2}), (True, {0: 1, "mask": 2, "target": 3})]
    assert left_out(told, lambda name: {1} if name == "target" else {0, 1}) == ""
    del told[1][1]["mask"]
    assert left_out(told, lambda name: {0, 1}) == (
        "rank 0 was given argument 1 and rank 1, which reads it, was not; pass the same batch on every rank, or make "
        "the Pipeline with batch_options=BatchOptions(inputs='first')"
    )
