"""Replay on other paths than the example's, and its random numbers: never by an old plan, never by where it is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model.nets import Chain, W, rows, square, trains
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PeerFailure

# -- plans that go stale


class Chooses(Chain):
    """The same calls whatever is in the batch, but another data flow."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks[0](x), self.blocks[1](x)
        chosen = first if x.sum() > 0 else second
        out: Tensor = self.blocks[3](torch.tanh(self.blocks[2](chosen)))
        return out


class ChoosesByUnit(Chooses):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks[0](x), self.blocks[1](x)
        chosen = first if first.tolist()[0][0] > 0 else second
        out: Tensor = self.blocks[3](torch.tanh(self.blocks[2](chosen)))
        return out


class Skips(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if x.sum() > 0 or block is self.blocks[0]:
                x = block(x)
        return x


@pytest.mark.parametrize("net", [Chooses, ChoosesByUnit, Skips])
def test_another_path_than_the_examples_raises(net: type[Chain]) -> None:
    torch.manual_seed(0)
    model = net()
    with torch.no_grad():
        for block in model.blocks:
            block.weight.copy_(torch.eye(W))
            block.bias.zero_()
    options: dict[str, Any] = {
        "microbatches": 2,
        "loss_fn": square,
        "cut_options": penstock.CutOptions(method="replay"),
    }
    with penstock.Pipeline(model, split_at=["blocks.2"], example=(torch.ones(2, W),), **options) as pipe:
        assert pipe.step(torch.ones(4, W)).loss is not None
        with pytest.raises(PeerFailure, match="took another path than with the example"):
            pipe.step(torch.cat([torch.ones(2, W), -torch.ones(2, W)]))


def test_a_plain_value_that_changes_raises() -> None:
    class Says(nn.Linear):
        def __init__(self) -> None:
            super().__init__(W, W)

        def forward(self, x: Tensor) -> Any:
            return super().forward(x), bool(x.sum() > 0)

    class Listens(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x, positive = block(x)
                x = x * 2 if positive else x
            return x

    options: dict[str, Any] = {
        "microbatches": 1,
        "loss_fn": square,
        "cut_options": penstock.CutOptions(method="replay"),
        "stages": 2,
    }
    with (
        penstock.Pipeline(Listens(4, Says), example=(torch.ones(4, W),), **options) as pipe,
        pytest.raises(PeerFailure, match=r"blocks\.0 returned False instead of True"),
    ):
        pipe.step(-torch.ones(4, W))


# -- randomness


class Noisy(Chain):
    """Dropout in units, between them, and in the glue itself."""

    def __init__(self) -> None:
        super().__init__(4, lambda: nn.Sequential(nn.Linear(W, W), nn.Dropout(0.3)))  # type: ignore[arg-type]
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.dropout(self.drop(block(x)), 0.1, self.training) + torch.randn(W) * 0.01
        return x


def noisy_gradients(**options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = Noisy(), rows()
    options = {
        "cut_options": penstock.CutOptions(method="replay"),
        "microbatches": 2,
        "loss_fn": square,
        "seed": 3,
        **options,
    }
    with penstock.Pipeline(model, example=(x[:2],), **options) as pipe:
        pipe.step(x)
        pipe.step(x)
        return [dict(pipe.named_parameters())[name].grad.clone() for name, _ in model.named_parameters()]  # type: ignore[union-attr]


@pytest.mark.slow
def test_masks_depend_neither_on_the_cut_nor_on_the_schedule() -> None:
    expected = noisy_gradients(stages=1)
    for options in (
        {"stages": 2},
        {"stages": 3, "schedule": "zb-h1"},
        {"stages": 4, "schedule": "zb-v"},
        {"stages": 4, "schedule": "gpipe", "recompute": "always"},
        {"split_at": ["blocks.3"]},
    ):
        assert all(map(torch.equal, expected, noisy_gradients(**options))), options


def test_hooks_that_change_a_units_weight_or_output_work() -> None:
    class Normed(Chain):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                nn.utils.parametrizations.weight_norm(block)
            self.blocks[1].register_forward_hook(lambda module, given, output: output * 2)

    assert trains(Normed(), rows(), stages=4) == 0.0
