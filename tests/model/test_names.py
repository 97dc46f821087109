"""Cuts before a later use: a block that the model calls again and again, on several stages with one set of weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model.nets import W, rows, square, trains
from tiers import by_turns
from torch import Tensor, nn

import penstock
from penstock import CutOptions
from penstock.errors import ModelError
from penstock.model.cut import cut_model
from penstock.model.names import name_and_use


class Again(nn.Module):
    """Calls one block four times; with a parameter of its own it can only be cut by graph."""

    def __init__(self, block: nn.Module, own: bool = False) -> None:
        super().__init__()
        self.block, self.head = block, nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4)) if own else None

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.relu(self.block(x))
            x = x if self.scale is None else x * self.scale
        out: Tensor = self.head(x)
        return out


def test_places_have_a_name_and_a_use() -> None:
    assert name_and_use("layers.3") == ("layers.3", 1)
    assert name_and_use("layers.3#12") == ("layers.3", 12)
    assert name_and_use("odd#name") == ("odd#name", 1)
    assert name_and_use("odd#0") == ("odd#0", 1)


@pytest.mark.parametrize(
    ("place", "split"), by_turns(["block#3", "scale#3"], ["replay", "graph"], fast=[("block#3", "replay")], one_in=1)
)
def test_a_stage_may_begin_with_a_later_use(split: Any, place: str) -> None:
    if (split, place) == ("replay", "scale#3"):
        with pytest.raises(ModelError, match="no unit 'scale' is called"):
            cut_model(
                Again(nn.Linear(4, 4), own=True),
                2,
                example=(torch.randn(2, 4),),
                split_at=[place],
                options=CutOptions(method=split),
            )
        return
    torch.manual_seed(0)
    model = Again(nn.Linear(4, 4), own=place == "scale#3")
    plain, x, y = copy.deepcopy(model), torch.randn(6, 4), torch.randn(6, 4)
    pipe = penstock.Pipeline(
        model,
        split_at=[place],
        microbatches=3,
        example=(x[:2],),
        cut_options=penstock.CutOptions(method=split),
        loss_fn=nn.functional.mse_loss,
    )
    assert [set(part.names.values()) >= {"block.weight"} for part in pipe.deployment.staged.parts] == [True, True]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, plain)]
    for _ in range(2):
        pipe.step(x, target=y)
        nn.functional.mse_loss(plain(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, msg=name)
    pipe.close()


@pytest.mark.parametrize("split", ["replay", "graph"])
def test_places_that_are_not_there_are_refused(split: Any) -> None:
    x = torch.randn(2, 4)
    with pytest.raises(ModelError, match=r"block#5 is not a place to cut: the model calls .* 4 times"):
        cut_model(Again(nn.Linear(4, 4)), 2, example=(x,), split_at=["block#5"], options=CutOptions(method=split))
    with pytest.raises(ModelError, match="before scale: it is not used there"):
        cut_model(
            Again(nn.Linear(4, 4), own=True), 2, example=(x,), split_at=["scale#5"], options=CutOptions(method="graph")
        )


def test_a_unit_that_updates_itself_is_not_torn() -> None:
    model = Again(nn.BatchNorm1d(4))
    with pytest.raises(ModelError, match="updates itself, so that all its calls belong on one stage"):
        cut_model(model, 2, example=(torch.randn(2, 4),), split_at=["block#2"], options=CutOptions(method="replay"))


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(W, W), nn.Tanh())


class Named(nn.Module):
    """Layers with a second name, a list that has some of another, a layer inside of a block and by itself."""

    def __init__(self) -> None:
        super().__init__()
        inner, norm = nn.Linear(W, W), nn.BatchNorm1d(W)
        self.first = nn.Sequential(inner, nn.Tanh())
        self.down = nn.ModuleList([layer(), layer()])
        self.last = self.down[-1]
        self.up = nn.ModuleList([self.last, layer()])
        self.end = nn.Sequential(inner, norm, nn.Linear(W, W))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.down, *self.up):
            x = block(x)
        out: Tensor = self.norm(self.end(x))
        return out


@pytest.mark.parametrize("stages", [2, 4])
def test_a_module_may_have_several_names(stages: int) -> None:
    torch.manual_seed(0)
    assert trains(Named(), rows(), stages=stages) < 1e-7
    model = Named()
    with penstock.Pipeline(model, stages=stages, microbatches=2, loss_fn=square, example=(rows(),)) as pipe:
        pipe.load_state_dict(Named().state_dict())
        Named().load_state_dict(pipe.state_dict())
        assert torch.equal(pipe.state_dict()["up.0.0.weight"], model.last[0].weight)


def test_a_layer_inside_of_a_block_that_cannot_be_opened_is_told_of() -> None:
    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.scale = inner, nn.Parameter(torch.ones(W))

        def forward(self, x: Tensor) -> Any:
            return self.inner(x) * self.scale

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = nn.Linear(W, W)
            self.blocks = nn.ModuleList([Scaled(inner), nn.Linear(W, W), inner])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

    with pytest.raises(ModelError, match=r"blocks\.0\.inner is a part of blocks\.0, which has parameters of its own"):
        trains(Both(), rows())
    assert trains(Both(), rows(), cut_options=CutOptions(method="graph")) < 1e-7
