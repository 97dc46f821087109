"""A small pipeline, and all numbers that two steps of it give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.schedule import Schedule

WIDTH = 5


def stages(count: int = 4, drop: float = 0.2) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(drop), nn.Tanh()) for _ in range(count)]


def pipeline(schedule: str | Schedule, microbatches: int | None = 4, **options: Any) -> penstock.Pipeline:
    return penstock.Pipeline(
        stages(), microbatches=microbatches, schedule=schedule, loss_fn=F.mse_loss, seed=2, **options
    )


def numbers(pipe: penstock.Pipeline) -> list[Tensor]:
    """The loss and all gradients of one step on the same batch."""
    torch.manual_seed(1)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    pipe.zero_grad()
    pipe.deployment.counter.step = 0
    loss = pipe.step(x, target=y).loss
    assert loss is not None
    return [loss, *(parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None)]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
