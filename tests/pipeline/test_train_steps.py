"""`train_steps` has the results of the loop that ends every step on all ranks together, to the last bit.

The loop that it is compared with is written out in `by_hand`. One group of processes runs all scenarios of a kind; each
returns what its rank saw.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deadlines import TIMEOUT
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.schedule import FAMILIES

WIDTH = 6
STEPS = 5
TRAINING = [name for name in FAMILIES if name != "forward-only"]
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Block(nn.Module):
    """A layer with random numbers, a buffer that changes, and a place in which to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return torch.tanh(self.drop(self.norm(self.linear(x))))


def pipeline(schedule: str, ranks: int = 2, transport: str | None = None, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    stages = ranks * FAMILIES[schedule].stages_per_rank
    dtype = options.pop("dtype", torch.float32)
    model = [Block().to(dtype) for _ in range(stages)]
    given = {"microbatches": 4, "loss_fn": F.mse_loss, "seed": 3, "timeout": TIMEOUT, **options}
    return penstock.Pipeline(model, schedule=schedule, transport=transport, **given)


def batches(scales: list[float], dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of different sizes, whose targets are that large: so are the gradients."""
    made = torch.Generator().manual_seed(4)
    for number, scale in enumerate(scales):
        rows = 9 + number % 3
        x, y = torch.randn(rows, WIDTH, generator=made), torch.randn(rows, WIDTH, generator=made)
        yield x.to(dtype), scale * y.to(dtype)


def state_of(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    inside = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [value.detach().clone() for value in (*pipe.state_dict().values(), *inside)]


def by_hand(pipe: penstock.Pipeline, data: Any, name: str, clip: float | None, skip: bool) -> dict[str, Any]:
    optimizer = OPTIMIZERS[name](pipe.parameters())
    rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses, norms, updated = [], [], []
    for x, y in data:
        loss = pipe.step(x, target=y).loss
        norm = pipe.grad_norm() if clip is None else pipe.clip_grad_norm_(clip)
        losses.append(loss.item())
        norms.append(norm.item())
        updated.append(not skip or (math.isfinite(norm) and math.isfinite(loss)))
        if updated[-1]:
            optimizer.step()
        rate.step()
        pipe.zero_grad()
    return {"losses": losses, "norms": norms, "updated": updated, "state": state_of(pipe, optimizer)}


def overlapped(pipe: penstock.Pipeline, data: Any, name: str, clip: float | None, skip: bool) -> dict[str, Any]:
    optimizer = OPTIMIZERS[name](pipe.parameters())
    rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    results = list(pipe.train_steps(data, optimizer, clip=clip, scheduler=rate, skip_nonfinite=skip))
    return {
        "losses": [result.loss.item() for result in results],
        "norms": [None if result.norm is None else result.norm.item() for result in results],
        "updated": [result.updated for result in results],
        "state": state_of(pipe, optimizer),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    found = [name for name in ("losses", "updated") if repr(one[name]) != repr(other[name])]
    if repr(one["norms"]) != repr(other["norms"]) and None not in other["norms"]:
        found.append(f"norms {one['norms']} {other['norms']}")
    if len(one["state"]) != len(other["state"]):
        return [*found, "length of state"]
    apart = [not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one["state"], other["state"], strict=True)]
    return [*found, *[f"state {number}" for number, odd in enumerate(apart) if odd]]


QUIET, BITES = [1.0] * STEPS, [1.0, 1.0, 40.0, 1.0, 30.0, 1.0]
SPOILED = [1.0, 1.0, math.inf, 1.0, 1.0, 1.0]
CASES = [
    *[(family, "adamw", None, False, QUIET) for family in TRAINING],
    ("zb-v", "sgd", 2.0, False, BITES),
    ("1f1b", "adamw", 2.0, False, BITES),
    ("zb-h2", "sgd", 1e9, False, QUIET),
    ("zb-h1", "adamw", 1e-3, False, QUIET),
    ("zb-v", "adamw", 5.0, True, SPOILED),
    ("1f1b", "sgd", None, True, SPOILED),
]


def compared(transport: str, cases: list[Any], ranks: int) -> dict[str, list[str]]:
    found = {}
    for family, name, clip, skip, scales in cases:
        pair = []
        for way in (by_hand, overlapped):
            with pipeline(family, ranks, transport, dtype=torch.float64) as pipe:
                pair.append(way(pipe, batches(scales, torch.float64), name, clip, skip))
        found[f"{family} {name} {clip} {skip}"] = differences(*pair)
    return found


@pytest.mark.parametrize("transport", ["shared", "distributed"])
def test_every_family_trains_as_the_loop_by_hand_on_processes(transport):
    for found in on_processes(2, compared, transport, CASES, 2):
        assert not {case: apart for case, apart in found.items() if apart}
