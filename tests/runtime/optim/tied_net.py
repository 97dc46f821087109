"""A model with norms, biases and a tied head, as a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

WIDTH = 6


class Net(nn.Module):
    """Norms, biases, a tied head, and two stages' worth of layers that own nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.act = nn.Sequential(nn.Tanh(), nn.Identity())
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.linear(self.norm(self.act(self.embed(ids)))))
        return out


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def model() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, (6,), generator=made), torch.randint(0, 9, (6,), generator=made)


def piped(**options: Any) -> penstock.Pipeline:
    given = {"stages": 3, "microbatches": 2, "loss_fn": loss_of, "example": (batch()[0][:2],), "timeout": 20}
    return penstock.Pipeline(options.pop("net", None) or model(), **{**given, **options})
