"""Small models of the tests of `Pipeline`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A layer with a parameter, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Net(), nn.ReLU(), Net(), nn.Linear(4, 4))
