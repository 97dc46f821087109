"""The two ways to train whose results are the same, to the last bit: by hand, and by `train_steps`."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from deadlines import TIMEOUT
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.schedule import FAMILIES, Action, Op, Schedule

WIDTH = 6
STEPS = 5
QUIET, BITES = [1.0] * STEPS, [1.0, 1.0, 40.0, 1.0, 30.0, 1.0]
LIMIT = 10.0  # above the norms of batches of scale 1, below those of scale 40
SPOILED = [1.0, 1.0, math.inf, 1.0, 1.0, 1.0]
SEARCHED: dict[str, Any] = {"memory": 2, "stages_per_rank": 4, "placements": "v", "objective": "steady", "effort": 40}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(
        parameters, lr=torch.tensor(0.1, dtype=torch.float64), momentum=0.9, nesterov=True, foreach=True
    ),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Block(nn.Module):
    """A layer with random numbers and a buffer that changes, which refuses what a spoiled weight would give it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            raise ValueError("numbers that are not finite")
        if self.training:
            self.seen += 1
        return torch.tanh(self.drop(self.norm(self.linear(x))))


@cache
def searched(ranks: int) -> Schedule:
    return penstock.schedule.search(ranks, 4, **SEARCHED)


def pipeline(schedule: str, ranks: int = 2, transport: str | None = None, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    chosen = searched(ranks) if schedule == "steady" else schedule
    stages = chosen.stages if isinstance(chosen, Schedule) else ranks * FAMILIES[schedule].stages_per_rank
    dtype = options.pop("dtype", torch.float32)
    model = [Block().to(dtype) for _ in range(stages)]
    given = {"microbatches": 4, "loss_fn": F.mse_loss, "seed": 3, "timeout": TIMEOUT, **options}
    return penstock.Pipeline(model, schedule=chosen, transport=transport, **given)


def batches(scales: list[float], dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of different sizes, whose targets are that large: so are the gradients. Drawn one after the other from a
    generator of their own, or in float64 from torch's, as by a data set that changes its samples at random.
    """
    made = torch.Generator() if dtype is torch.float32 else torch.default_generator
    made.manual_seed(4)
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


def hold_back(pipe: penstock.Pipeline, name: str) -> None:
    """The last rank ends each step only when the first has begun the next one: together they would never end it."""
    store, began, ended = dist.distributed_c10d._get_default_store(), [0], [0]
    last = [action for action in pipe.program.rows[1] if action.op is Op.W][-1]

    def forward(action: Action, context: Any) -> None:
        if pipe.rank == 0 and action.microbatch == 0:
            store.set(f"{name} began {began[0]}", "yes")
            began[0] += 1
        context.run(action)

    def weights(action: Action, context: Any) -> None:
        if pipe.rank == 1 and action == last:
            if 0 < ended[0] < STEPS - 1:  # a pipeline's first step ends on all ranks together
                store.wait([f"{name} began {ended[0] + 1}"], timedelta(seconds=TIMEOUT))
            ended[0] += 1
        context.run(action)

    pipe.register("F", forward)
    pipe.register("W", weights)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)
