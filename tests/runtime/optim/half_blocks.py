"""Blocks that compute in half precision in the middle, as a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

WIDTH = 8
ROWS = 6
COUNT = 3  # microbatches


class Spy(torch.autograd.Function):
    """Says whether autocast is on, forward and backward."""

    seen: list[tuple[str, bool]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Spy.seen.append(("forward", torch.is_autocast_enabled("cpu")))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Spy.seen.append(("backward", torch.is_autocast_enabled("cpu")))
        return gradients[0]


class Block(nn.Module):
    """Half precision in the middle; an autocast of its own, as rotary embeddings have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.came: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.came.append(x.dtype)
        with torch.autocast("cpu", enabled=False):
            x = self.norm(x.to(self.norm.weight.dtype))
        out: Tensor = Spy.apply(torch.tanh(self.linear(x)))
        return out


def stages(kind: type[nn.Module] = Block) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind() for _ in range(3)]


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=made), torch.randn(ROWS, WIDTH, generator=made)


def piped(model: Any = None, **options: Any) -> penstock.Pipeline:
    given = {"microbatches": COUNT, "loss_fn": F.mse_loss, "precision": "bf16", "timeout": 20, **options}
    return penstock.Pipeline(stages() if model is None else model, **given)
