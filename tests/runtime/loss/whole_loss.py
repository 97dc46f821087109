"""The loss of a whole batch and its gradients, in one piece."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import penstock


def stages(count: int = 2, last: int = 6) -> list[nn.Module]:
    torch.manual_seed(3)
    hidden = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count - 1)]
    return [module.double() for module in [*hidden, nn.Linear(6, last)]]


def gradients(pipe: penstock.Pipeline) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]


def whole(pipe: penstock.Pipeline, loss: Any) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients that the model gives without a pipeline."""
    model = nn.Sequential(*pipe.deployment.ranks.modules().values())
    pipe.zero_grad()
    value = loss(model)
    value.backward()
    found = gradients(pipe)
    pipe.zero_grad()
    return value.detach(), found


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
