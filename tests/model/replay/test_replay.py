"""Replay gets a hard model right, or refuses it with the name of the module and a remedy."""

from __future__ import annotations

import copy
import warnings
from functools import lru_cache
from typing import Any

import pytest
import torch
from model import nets
from model.nets import Chain, W, rows, square, trains
from tiers import by_turns
from torch import Tensor, nn

import penstock
from penstock.errors import ModelError

IMAGE = (4, 2, 8, 8)


EXACT = [
    (nets.UNet, [IMAGE]),
    (nets.ResNet, [IMAGE]),
    (nets.Tuples, [(4, W)]),
    (nets.InPlace, [(4, W)]),
    (lambda: Chain(4, nets.LowRank), [(4, W)]),
]
ROUNDED = [
    (nets.TwoInputs, [(4, W), (4, W)]),
    (nets.Shared, [(4, W)]),
    (nets.AbsentAttributes, [(4, W)]),
]


def cuts(nets: list[Any]) -> pytest.MarkDecorator:
    """Let a test have each net with 4 stages and a split backward, and with other cuts by turns."""
    given = by_turns(nets, [2, 4], ["1f1b", "zb-h1"], fast=[(*net, 4, "zb-h1") for net in nets])
    return pytest.mark.parametrize(("net", "shapes", "stages", "schedule"), given)


@cuts(EXACT)
def test_skips_in_place_work_odd_outputs_and_frozen_weights_are_exact(
    net: Any, shapes: list[Any], stages: int, schedule: str
) -> None:
    torch.manual_seed(0)
    assert trains(net(), *(rows(*shape) for shape in shapes), stages=stages, schedule=schedule) == 0.0


@pytest.mark.filterwarnings("ignore::penstock.errors.CutWarning")  # that they share it
@cuts(ROUNDED)
def test_what_several_stages_share_is_exact_to_rounding(
    net: Any, shapes: list[Any], stages: int, schedule: str
) -> None:
    torch.manual_seed(0)
    assert trains(net(), *(rows(*shape) for shape in shapes), stages=stages, schedule=schedule) < 1e-6


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_tied_head_and_a_frozen_embedding(stages: int, frozen: bool) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 20, (4, 5))
    assert trains(nets.Tied(frozen=frozen), ids, stages=stages, schedule="zb-h1") < 1e-6


def test_scripted_glue_is_seen_through() -> None:
    class Scripted(Chain):
        def forward(self, x: Tensor) -> Tensor:
            first = None
            for block in self.blocks:
                x = block(x)
                first = x if first is None else first
                x = scripted(x, first)
            return x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(_mixed)
    assert trains(Scripted(), rows(), stages=3) < 1e-6


def _mixed(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x) * y + 1.0


# -- leaks


class Stashes(nn.Module):
    """Beside what it returns, it keeps something that others read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.kept = y
        self.penalty = y.square().mean()
        return y


class ReadsPenalty(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + sum(block.penalty for block in self.blocks)


class ReadsOutput(Chain):
    """What it reads is the returned tensor itself, by another way."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.blocks[0].kept


class Hooked(Chain):
    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.seen: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda module, given, output: self.seen.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        x = super().forward(x)
        return x + self.seen[0]


@pytest.mark.parametrize("net", [ReadsPenalty, ReadsOutput, Hooked])
def test_a_leak_is_refused_with_the_module_and_a_remedy(net: type[Chain]) -> None:
    with pytest.raises(ModelError, match=r"blocks\.0 gives a tensor away.*return it"):
        trains(net(4, Stashes), rows())


def test_a_cache_of_the_process_that_a_unit_fills_is_no_leak() -> None:
    """Beit's first layer computes a table under `functools.lru_cache`, and the others find it there.

    The first model of a process was refused for that, and trained from its graph; the second was not.
    """

    @lru_cache
    def table(width: int) -> Tensor:
        return torch.arange(width) / width

    class Looks(nn.Linear):
        def __init__(self) -> None:
            super().__init__(W, W)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + table(x.shape[1])

    assert trains(Chain(block=Looks), rows(), stages=4) == 0
    table.cache_clear()
    model, x = Chain(block=Looks), rows()
    plain = copy.deepcopy(model)
    with penstock.Pipeline(model, stages=4, microbatches=2, loss_fn=square, example=(x[:2],)) as pipe:
        table.cache_clear()  # as for inputs of another size
        assert torch.equal(pipe.step(x).loss, (square(plain(x[:2])) + square(plain(x[2:]))).detach() / 2)


def test_a_unit_that_changes_its_argument_in_place_is_refused() -> None:
    class Changes(nn.Linear):
        def __init__(self) -> None:
            super().__init__(W, W)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(-1, W).mul_(2.0))

    with pytest.raises(ModelError, match=r"blocks\.0 changes a tensor .* in place.*return the new tensor"):
        trains(Chain(4, Changes), rows())


def test_glue_that_changes_a_buffer_is_refused() -> None:
    class Counts(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            out: Tensor = super().forward(x)
            return out

    with pytest.raises(ModelError, match="changes the buffer calls in place"):
        trains(Counts(), rows())


def test_glue_that_draws_from_pythons_generator_is_refused() -> None:
    import random

    class Draws(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * random.random()

    with pytest.raises(ModelError, match=r"Python's random or numpy"):
        trains(Draws(), rows())


def test_a_parameter_free_norm_on_the_input_counts_once() -> None:
    class Normed(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(W, affine=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(self.norm(x))
            return out

    assert trains(Normed(), rows(), stages=4) == 0.0
    assert trains(Normed(), rows(), stages=2, recompute="always") == 0.0
    options: dict[str, Any] = {
        "cut_options": penstock.CutOptions(method="replay"),
        "microbatches": 2,
        "loss_fn": square,
        "example": (rows(),),
    }
    with penstock.Pipeline(model := Normed(), stages=2, **options) as pipe:  # on threads the stages share its buffers
        owners = [
            stage
            for stage, module in pipe.deployment.ranks.modules().items()
            if any(inner._buffers is model.norm._buffers for inner in module.own_modules())
        ]
        assert owners == [0]
