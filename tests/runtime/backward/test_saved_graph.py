"""What a microbatch holds between its forward and its backward: the gradient that goes back is that of its input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime.engine.small import SCHEDULES, Small, check
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.model.by_position import split_by_position
from penstock.runtime.engine.stage import Stage, StageInput
from penstock.runtime.state.randomness import StageRandomness


def turned(x: Tensor) -> Tensor:
    """The gradient that comes back from this lies in other strides than x."""
    return x.t().contiguous().t()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_on_what_a_stage_receives_change_the_gradient_that_goes_back(schedule: str) -> None:
    class Hooked(Small):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
                x.register_hook(lambda gradient: None)
            return super().forward(turned(x))

    check(schedule, lambda: [Hooked() for _ in range(4)])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_gradient_that_a_stage_takes_itself_is_not_what_goes_back(schedule: str) -> None:
    class Steep(Small):
        def forward(self, x: Tensor) -> Tensor:
            inner = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad((turned(inner) ** 3).sum(), inner)
            return super().forward(x) + slope

    check(schedule, lambda: [Steep() for _ in range(4)])


def one_stage(module: nn.Module) -> Stage:
    from contextlib import nullcontext

    (part,) = split_by_position([module], None, None).parts
    return Stage(part, StageRandomness(lambda microbatch: nullcontext(), None), is_last=True)


def test_a_microbatch_goes_forward_once_and_back_once() -> None:
    stage = one_stage(nn.Linear(2, 1))
    given = StageInput(0, {}, (torch.randn(3, 2),), {}, lambda output: output.mean(), split_backward=True)
    stage.forward(given)
    with pytest.raises(RunError, match="stage 0 has run microbatch 0 forward already"):
        stage.forward(given)
    seeds: dict[str, Any] = {"split_backward": True, "loss_seed": torch.tensor(1.0), "extra_seed": None}
    with pytest.raises(RunError, match="no postponed weight gradient of microbatch 0"):
        stage.weight_gradients(0)
    stage.backward(0, {}, **seeds)
    with pytest.raises(RunError, match="cannot run the backward of microbatch 0: its forward has not run"):
        stage.backward(0, {}, **seeds)
    stage.weight_gradients(0)
    with pytest.raises(RunError, match="no postponed weight gradient of microbatch 0"):
        stage.weight_gradients(0)
