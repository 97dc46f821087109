"""The optimizer's state of all ranks is that of an optimizer of the whole model, and goes back into any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.errors import CheckpointError
from penstock.integrations.state import OptimizerState


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Two groups, as trainers make them: what is decayed, and what is not."""
    every = list(parameters)
    groups = [{"params": [each for each in every if (each.dim() > 1) is decayed]} for decayed in (True, False)]
    return torch.optim.AdamW(groups, lr=0.1)


def trained() -> dict[str, Any]:
    plain, x = model(), torch.ones(4, 4, dtype=torch.float64)
    optimizer = optimizer_of(plain.parameters())
    F.mse_loss(plain(x), x * 2).backward()
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_it_is_joined_and_taken_apart_by_names(stages: int) -> None:
    x, names = torch.ones(4, 4, dtype=torch.float64), [name for name, _ in model().named_parameters()]
    with penstock.Pipeline(model(), stages=stages, microbatches=2, loss_fn=F.mse_loss) as pipe:
        optimizer = optimizer_of(pipe.parameters())
        pipe.step(x, target=x * 2)
        optimizer.step()
        whole = OptimizerState(pipe, names, optimizer).whole()
        torch.testing.assert_close(whole, trained(), rtol=1e-9, atol=1e-12)
        later = optimizer_of(pipe.parameters())
        OptimizerState(pipe, names, later).load(whole, "saved")
        torch.testing.assert_close(later.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


def test_a_state_of_another_model_is_refused_with_the_numbers() -> None:
    names = [name for name, _ in model().named_parameters()]
    with penstock.Pipeline(model()[:2], stages=2, microbatches=2, loss_fn=F.mse_loss) as pipe:
        state = OptimizerState(pipe, names, optimizer_of(pipe.parameters()))
        with pytest.raises(CheckpointError, match=r"saved has 2 parameter groups with \[4, 4\] members.*\[2, 2\]"):
            state.load(trained(), "saved")
