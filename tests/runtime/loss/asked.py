"""A small model whose losses are asked whether their microbatches make the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ModelError, PeerFailure

WIDTH, LENGTH, M = 6, 4, 3


Loss = Callable[..., Tensor]


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def pipeline(loss: Loss | None, **options: Any) -> penstock.Pipeline:
    return penstock.Pipeline(model(), **{"stages": 2, "microbatches": M, "loss_fn": loss, **options})


def batch(rows: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and a mask that is uneven."""
    torch.manual_seed(seed)
    mask = torch.rand(rows, LENGTH) < 0.7
    mask[0] = True
    mask[1:3, 1:] = False
    return torch.randn(rows, LENGTH, WIDTH).double(), torch.randn(rows, LENGTH, WIDTH).double(), mask


def masked(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    terms = (output - target).square().mean(-1) * mask
    return terms.sum() / mask.sum()


def whole(loss: Loss, x: Tensor, y: Tensor, **extra: Any) -> tuple[Tensor, list[Tensor]]:
    net = model()
    value = loss(net(x), y, **extra)
    value.backward()
    return value.detach(), [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def stepped(pipe: penstock.Pipeline, *args: Any, **given: Any) -> tuple[Tensor | None, list[Tensor]]:
    pipe.zero_grad()
    result = pipe.step(*args, **given)
    return result.loss, [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def refused(pipe: penstock.Pipeline, *args: Any, **given: Any) -> str:
    with pytest.raises(PeerFailure) as caught:
        pipe.step(*args, **given)
    assert isinstance(caught.value.__cause__, ModelError)
    return str(caught.value.__cause__)
