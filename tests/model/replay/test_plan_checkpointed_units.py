"""Models that checkpoint their own blocks: exact where the unit runs again by itself, refused where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model.nets import Chain, W, rows, square, trains
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import ModelError, PenstockError


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
        options: dict[str, Any] = {
            "cut_options": penstock.CutOptions(method="replay"),
            "microbatches": 2,
            "loss_fn": square,
            "seed": 3,
            "stages": 2,
        }
        with penstock.Pipeline(model, example=(x[:2],), schedule=schedule, **options) as pipe:
            pipe.step(x)
            found.append([parameter.grad for parameter in pipe.parameters()])
    assert all(map(torch.equal, *found))


class Around(Chain):
    """The model's own code checkpoints its blocks, as many do."""

    reentrant = False
    checkpoints = True

    def __init__(self) -> None:
        super().__init__(4, lambda: nn.Sequential(nn.Linear(W, W), nn.Dropout(0.3), nn.Tanh()))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.checkpoints else block(x)
        return x


@pytest.mark.parametrize(("stages", "schedule"), [(2, "1f1b"), (2, "zb-h1"), (4, "zb-v")])
def test_checkpointing_around_a_unit_in_the_glue_changes_nothing(stages: int, schedule: str) -> None:
    found = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model, x = Around(), rows()
        model.checkpoints = checkpoints
        options: dict[str, Any] = {
            "cut_options": penstock.CutOptions(method="replay"),
            "microbatches": 2,
            "loss_fn": square,
            "seed": 3,
        }
        with penstock.Pipeline(model, example=(x[:2],), stages=stages, schedule=schedule, **options) as pipe:
            for _ in range(2):
                pipe.step(x)
            found.append([parameter.grad for _, parameter in sorted(pipe.named_parameters())])
    assert all(gradient.any() for gradient in found[1])
    assert all(map(torch.equal, *found))


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_a_checkpoint_that_hides_gradients_is_refused() -> None:
    """The first stage sends on what was made without gradients: its parameters would have got none."""
    model = Around()
    model.reentrant = True
    with pytest.raises(
        PenstockError, match=r"calls blocks\.\d inside of a torch\.autograd\.Function .*use_reentrant=False"
    ):
        trains(model, rows().requires_grad_())


class Reversible(torch.autograd.Function):
    """As reversible networks do: forward without a graph, and the layers once more in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Any) -> Tensor:
        ctx.blocks = blocks
        ctx.save_for_backward(x.detach())
        for block in blocks:
            x = block(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x = x.requires_grad_()
            for block in ctx.blocks:
                y = block(y)
        torch.autograd.backward(y, gradient)
        return x.grad, None


def test_units_inside_of_an_autograd_function_are_refused() -> None:
    """What a stage sent on from inside had no graph: all parameters before it were left without gradients."""

    class Reverses(Chain):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = Reversible.apply(torch.tanh(self.blocks[0](x)), list(self.blocks)[1:])
            return y

    with pytest.raises(ModelError, match=r"calls blocks\.\d inside of a torch\.autograd\.Function"):
        trains(Reverses(), rows())


def test_a_checkpoint_around_units_of_several_stages_is_refused() -> None:
    class AroundAll(Chain):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return y

    with pytest.raises(PenstockError, match=r"checkpoints the call of blocks\.\d.*let the unit checkpoint itself"):
        trains(AroundAll(), rows())
