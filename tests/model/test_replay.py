"""Replay gets right what ../../shared/replay.md lists, or refuses it with the module's name and a remedy."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock
from model import nets
from model.nets import Chain, W
from penstock.errors import ModelError, PeerFailure, PenstockError

IMAGE = (4, 2, 8, 8)


def rows(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, W)))


def square(output: Any, _: Any = None) -> Tensor:
    """A loss on whatever a net returns."""
    if isinstance(output, dict):
        return output["near"].square().mean() + output["far"].mean()
    if isinstance(output, nets.Answer):
        return output.value.square().mean()
    return output.square().mean()


def trains(model: nn.Module, *inputs: Tensor, steps: int = 2, stages: int = 2, **options: Any) -> float:
    """How far the pipeline's gradients and losses are from the plain model's, for two steps."""
    plain = copy.deepcopy(model)
    options = {"split": "replay", "microbatches": 2, "loss_fn": square, "stages": stages, **options}
    far = 0.0
    with penstock.Pipeline(model, example=tuple(each[:2].clone() for each in inputs), **options) as pipe:
        for _ in range(steps):
            expected = torch.zeros(())
            for number in range(2):
                loss = square(plain(*(each[2 * number : 2 * number + 2].clone() for each in inputs))) / 2
                loss.backward()
                expected = expected + loss.detach()
            far = max(far, (expected - pipe.step(*inputs).loss).abs().item())
            found = dict(pipe.named_parameters())
            assert set(found) == {name for name, _ in plain.named_parameters()}
            for name, parameter in plain.named_parameters():
                gradient = found[name].grad
                assert (parameter.grad is None) == (gradient is None), name
                if parameter.grad is not None and gradient is not None:
                    far = max(far, (parameter.grad - gradient).abs().max().item())
        state = pipe.state_dict()
        assert set(state) == set(plain.state_dict())
        for name, buffer in plain.named_buffers():
            assert torch.equal(state[name], buffer), name
    return far


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


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(("net", "shapes"), EXACT)
def test_skips_in_place_work_odd_outputs_and_frozen_weights_are_exact(
    net: Any, shapes: list[Any], stages: int, schedule: str
) -> None:
    torch.manual_seed(0)
    assert trains(net(), *(rows(*shape) for shape in shapes), stages=stages, schedule=schedule) == 0.0


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(("net", "shapes"), ROUNDED)
def test_what_several_stages_share_is_exact_to_rounding(net: Any, shapes: list[Any], stages: int, schedule: str) -> None:
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

    def forward(self, x: Tensor, into: list[Tensor] | None = None) -> Tensor:
        y: Tensor = self.linear(x)
        self.kept = y
        self.penalty = y.square().mean()
        if into is not None:
            into.append(y * 2)
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


class Appends(Chain):
    def forward(self, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        for block in self.blocks:
            x = block(x, cache)
        return x + cache[0]


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


@pytest.mark.parametrize("net", [ReadsPenalty, ReadsOutput, Appends, Hooked])
def test_a_leak_is_refused_with_the_module_and_a_remedy(net: type[Chain]) -> None:
    with pytest.raises(ModelError, match=r"blocks\.0 gives a tensor away.*return it"):
        trains(net(4, Stashes), rows())


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
    options: dict[str, Any] = {"microbatches": 2, "loss_fn": square, "split": "replay"}
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

    options: dict[str, Any] = {"microbatches": 1, "loss_fn": square, "split": "replay", "stages": 2}
    with (
        penstock.Pipeline(Listens(4, Says), example=(torch.ones(4, W),), **options) as pipe,
        pytest.raises(PeerFailure, match="blocks.0 returned False instead of True"),
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
    options = {"split": "replay", "microbatches": 2, "loss_fn": square, "seed": 3, **options}
    with penstock.Pipeline(model, example=(x[:2],), **options) as pipe:
        pipe.step(x)
        pipe.step(x)
        return [dict(pipe.named_parameters())[name].grad.clone() for name, _ in model.named_parameters()]  # type: ignore[union-attr]


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


class SelfCheckpointing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(W, W), nn.Dropout(0.3)

    def run(self, x: Tensor) -> Tensor:
        return torch.tanh(self.drop(self.linear(x)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.run, x, use_reentrant=False) if self.checkpoints else self.run(x)
        return out


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_checkpointing_inside_units_changes_nothing(schedule: str) -> None:
    found = []
    for checkpoints in (False, True):
        SelfCheckpointing.checkpoints = checkpoints  # type: ignore[attr-defined]
        torch.manual_seed(0)
        model, x = Chain(4, SelfCheckpointing), rows()
        options: dict[str, Any] = {"split": "replay", "microbatches": 2, "loss_fn": square, "seed": 3, "stages": 2}
        with penstock.Pipeline(model, example=(x[:2],), schedule=schedule, **options) as pipe:
            pipe.step(x)
            found.append([parameter.grad for parameter in pipe.parameters()])
    assert all(map(torch.equal, *found))


def test_checkpointing_around_a_unit_in_the_glue_is_refused_when_it_would_run_again() -> None:
    class Around(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    with pytest.raises(PenstockError, match=r"checkpoints the call of blocks\.\d.*let the unit checkpoint itself"):
        trains(Around(4, SelfCheckpointing), rows().requires_grad_())


def test_hooks_that_change_a_units_weight_or_output_work() -> None:
    class Normed(Chain):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                nn.utils.parametrizations.weight_norm(block)
            self.blocks[1].register_forward_hook(lambda module, given, output: output * 2)

    assert trains(Normed(), rows(), stages=4) == 0.0
