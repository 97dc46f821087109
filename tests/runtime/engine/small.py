"""Small stages, run by a plain loop and by schedules of full and of split backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

SCHEDULES = ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v"]


WIDTH = 6


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.norm(self.linear(x)))
        return out


def check(schedule: str, make: Callable[[], list[nn.Module]], loss_fn: Any = F.mse_loss) -> penstock.Pipeline:
    """Two steps of the pipeline and of the plain loop on the same stages: the same gradients, None where None is."""
    torch.manual_seed(0)
    stages = make()
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    pipe = penstock.Pipeline(stages, microbatches=4, schedule=schedule, ranks=2, loss_fn=loss_fn)
    for _ in range(2):
        pipe.step(x, target=y)
    found = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    for parameter in pipe.parameters():
        parameter.grad = None
    for _ in range(2):
        for a, b in zip(x.split(2), y.split(2), strict=True):
            value: Any = (a,)
            for stage in stages:
                value = stage(*value) if isinstance(value, tuple) else stage(value)
            (loss_fn(value, b) / 4).backward()
    for name, parameter in pipe.named_parameters():
        wanted, got = parameter.grad, found[name]
        assert (got is None) == (wanted is None), name
        assert got is None or wanted is None or torch.equal(got, wanted), name
    return pipe
