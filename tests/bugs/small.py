"""Small pipelines for the stories of tests/bugs: double precision, compared with the whole batch in one piece."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.schedule import Schedule

WIDTH = 4
SPLIT = ["1f1b", "interleaved-zb", "zb-v", "dualpipe-v"]


def linears(count: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).double() for _ in range(count)]


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=made).double(), torch.randn(rows, WIDTH, generator=made).double()


def pipeline(stages: Any = None, schedule: Any = "1f1b", **options: Any) -> penstock.Pipeline:
    given = {"loss_fn": F.mse_loss, "microbatches": 4, **options}
    if isinstance(schedule, Schedule):
        del given["microbatches"]
    return penstock.Pipeline(linears() if stages is None else stages, schedule=schedule, **given)


def gradients(pipe: penstock.Pipeline) -> list[Tensor | None]:
    found = [None if parameter.grad is None else parameter.grad.clone() for parameter in pipe.parameters()]
    pipe.zero_grad()
    return found


def of_the_whole_batch(pipe: penstock.Pipeline, x: Tensor, y: Tensor) -> list[Tensor | None]:
    """What autograd gives for the model and the batch in one piece."""
    F.mse_loss(nn.Sequential(*pipe.deployment.ranks.modules().values())(x), y).backward()
    return gradients(pipe)


def check(pipe: penstock.Pipeline, rows: int = 8) -> None:
    x, y = batch(rows)
    pipe.step(x, target=y)
    found = gradients(pipe)
    torch.testing.assert_close(found, of_the_whole_batch(pipe, x, y), rtol=1e-12, atol=1e-12)
