"""`penstock.compat.torchgpipe.balance`."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from compat.torchgpipe.models import cells, unet
from torch import Tensor, nn

from penstock.compat.torchgpipe import GPipe
from penstock.compat.torchgpipe.balance import balance_by_size, balance_by_time
from penstock.model.declared_skips import waiting_skips


def widths(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(first, second) for first, second in pairwise(sizes)])


def test_by_size_counts_parameters_as_often_as_asked() -> None:
    assert balance_by_size(2, widths(1, 2, 3, 4, 5, 6, 7), torch.rand(7, 1), param_scale=100) == [4, 2]
    assert balance_by_size(2, widths(7, 6, 5, 4, 3, 2, 1), torch.rand(7, 7), param_scale=100) == [2, 4]


def test_by_size_counts_what_a_microbatch_leaves_in_memory() -> None:
    class Keeps(nn.Module):
        def __init__(self, many: int) -> None:
            super().__init__()
            self.many, self.weight = many, nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.many):
                x = torch.tanh(x * self.weight)
            return x

    model, x = nn.Sequential(*map(Keeps, [1, 2, 3, 4, 5, 6])), torch.rand(64, 100)
    assert balance_by_size(2, model, x, param_scale=0) == [4, 2]
    # a large layer without activations weighs as much as a batch of activations, and more than one microbatch of them
    mixed = nn.Sequential(nn.Linear(100, 100), Keeps(1), Keeps(1), Keeps(1))
    assert balance_by_size(2, mixed, x, param_scale=2.0, chunks=64) == [1, 3]


def test_by_time_measures_the_layers() -> None:
    """The last layer takes a thousand times as long as the others, on any machine."""

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(5000):
                x = x + 1
            return x

    assert balance_by_time(2, nn.Sequential(*[nn.Identity()] * 5, Slow()), torch.rand(1), timeout=0) == [5, 1]


@pytest.mark.parametrize("balance_of", [lambda *given: balance_by_time(*given, timeout=0), balance_by_size])
def test_the_model_stays_as_it_is(balance_of: Any) -> None:
    class Looks(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            assert self.training
            return pair[0] + pair[1]

    class Twin(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x.detach()

    model = nn.Sequential(nn.BatchNorm2d(3), Twin(), Looks(), nn.Dropout()).eval()
    x = torch.rand(2, 3, 4, 4, requires_grad=True)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert sum(balance_of(2, model, x)) == 4
    assert x.grad is None
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("build", [unet, cells])
def test_models_with_skips(build: Any) -> None:
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    for balance in (balance_by_time(3, build(), x, timeout=0), balance_by_size(3, build(), x, chunks=2)):
        assert GPipe(build(), balance, devices=["cpu"] * 3, chunks=2)(x).shape == x.shape
    assert not waiting_skips()


def test_what_cannot_be_balanced() -> None:
    x = torch.rand(1, 1)
    model = nn.Sequential(nn.Linear(1, 1))
    for partitions in (0, -1, 2):
        with pytest.raises(ValueError, match="partitions"):
            balance_by_time(partitions, model, x)
    with pytest.raises(TypeError, match=r"nn\.Sequential"):
        balance_by_size(1, nn.Linear(1, 1), x)  # type: ignore[arg-type]
    model(x).sum().backward()
    with pytest.raises(ValueError, match="have gradients"):
        balance_by_time(1, model, x)
