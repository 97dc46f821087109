"""What is counted on tensors without memory, held against formulas and against tensors with memory."""

from __future__ import annotations

import pytest
import torch
from planner_cases import counted_flops
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from penstock.planner.cluster import Software
from penstock.planner.fake_model import profile_module
from penstock.planner.plan import config_for


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Conv1d(3, 8, 3, bias=False), nn.Conv1d(8, 8, 3, stride=2)), (3, 16)),
        (nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(512, 10)), (3, 8, 8)),
        (nn.Sequential(nn.ConvTranspose2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 4, 3)), (3, 8, 8)),
    ],
    ids=["1d", "2d", "transposed"],
)
def test_convolutions_count_what_torch_counts(model: nn.Module, shape: tuple[int, ...]) -> None:
    """The gradients of a convolution are three outputs, of which the first is None where the input needs none.

    They were given to torch's formula without the Nones: every model with a convolution ended in an IndexError.
    """
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.zeros(1, *shape)).sum().backward()
    assert counted_flops(model, torch.zeros(1, *shape)) == counter.get_total_flops() > 0


def test_a_grouped_convolution_has_gradients_as_dear_as_its_forward() -> None:
    """Torch's own formula counts the gradient of the weights as if every channel met every other."""
    model = nn.Sequential(nn.Conv2d(8, 8, 1, groups=8), nn.Conv2d(8, 8, 3, padding=1, groups=4))
    forward = [2 * 64 * 8, 2 * 64 * 8 * 2 * 9]
    assert counted_flops(model, torch.zeros(1, 8, 8, 8)) == 2 * forward[0] + 3 * forward[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_experts_of_a_layer_count_the_rows_that_each_is_given(dtype: torch.dtype) -> None:
    """Torch makes a product of groups without memory in bfloat16 only, and has no formula for its operations."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(4, 16, 32, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.arange(1, 5, dtype=torch.int32) * (len(x) // 4)
            return F.grouped_mm(x, self.weights, offs=ends)

    x = torch.zeros(8, 16, dtype=dtype, requires_grad=True)
    model = Experts()
    assert model(x).shape == (8, 32)
    model(x).square().sum().backward()  # torch has both directions, with memory
    assert model.weights.grad is not None
    profile = profile_module(model, (x.detach(),), config_for("gpt", sequence=1), Software())
    layer = profile.units(8)[1]
    assert layer.output == 8 * 32 * dtype.itemsize
    assert layer.forward.flops.at(1) == layer.backward.flops.at(1) == 2 * 8 * 16 * 32
