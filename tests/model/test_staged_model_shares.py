"""Stages that nobody would ask for are announced, with names and shares; others are not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from model.nets import Shared, Tied, W, rows, square
from torch import Tensor, nn

import penstock
from penstock.errors import CutWarning
from penstock.model.cut import cut_model
from penstock.model.staged_model import doubts_about
from penstock.schedule import build


def doubts(model: Any, stages: int | None = 2, *inputs: Tensor, **options: Any) -> tuple[str, ...]:
    return cut_model(model, stages, example=inputs or (rows(2, W),), **options).doubts


class Outside(nn.Module):
    """A block's layers are called from outside of it, by a function that reads their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Linear(W, W), nn.Linear(W, 4 * W, bias=False), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x) @ self.wide.weight.t() @ self.wide.weight)
        out: Tensor = self.last(x) @ self.wide.weight.t()
        return out


class OneLarge(nn.Module):
    """Two small layers, and a large unit whose own parameter keeps it together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(W, W), nn.ModuleList([Whole(), nn.Linear(W, W)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.rest:
            x = layer(x)
        return x


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(W))
        self.layers = nn.ModuleList(nn.Linear(W, W) for _ in range(30))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        return x


def test_a_stage_that_has_most_of_the_model_is_named_with_its_layers() -> None:
    (doubt,) = doubts(OneLarge(), 3)
    assert doubt.startswith("stage 1 has 94% of the model's parameters (rest.0.layers.0 3%, ")
    assert "and 28 more), where 33% would be even; name other places to cut with split_at=" in doubt


@pytest.mark.parametrize("how", ["time", "memory", {"first": 1, "rest.0": 5, "rest.1": 1}])
def test_whatever_was_balanced_nearly_all_of_the_model_on_one_stage_is_odd(how: Any) -> None:
    assert "has 94% of the model's parameters" in doubts(OneLarge(), 3, balance=how)[0]


def test_parameters_that_several_stages_train_are_named() -> None:
    (doubt,) = doubts(Outside(), 2)
    assert doubt.startswith("stages 0, 1 each hold and train 64% of the model's parameters (wide 64%)")
    (doubt,) = doubts(Shared(), 4)
    assert doubt.startswith("stages 1, 2, 3 each hold and train 33% of the model's parameters (blocks.0 33%)")


def test_a_stage_without_parameters_is_named() -> None:
    layers = nn.Sequential(nn.Linear(W, W), nn.ReLU(), nn.Linear(W, W), nn.ReLU())
    assert doubts(layers, 4) == ("no parameters are on stages 1, 3; pass fewer stages, or other counts with balance=",)


@pytest.mark.parametrize("stages", [2, 4])
def test_what_is_meant_is_not_announced(stages: int) -> None:
    ids = torch.randint(0, 20, (2, 3))
    assert not doubts(Tied(), stages, ids), "a table that is the head as well"
    assert not doubts(Tied(words=4000), stages, ids), "and is most of the model"
    assert not doubts(OneLarge(), 2, balance=[1, 2]), "the user's own counts"
    assert not doubts(OneLarge(), 2, split_at=["rest.0"]), "and names"
    assert not doubts([nn.Linear(W, W), nn.ReLU()], None), "and stages"
    assert not doubts(nn.Sequential(nn.LSTM(W, 8 * W), nn.Linear(W, W)), 2), "one layer, however large"
    assert not doubts(nn.Sequential(nn.ReLU(), nn.Tanh()), 2), "nothing to train"


def test_the_stages_of_a_rank_count_together() -> None:
    """With two stages on each rank, in a V, the first and the last are one rank's: only their sum can be even."""
    layers = nn.Sequential(*(nn.Linear(W, W) for _ in range(20)))
    staged = cut_model(layers, 4, balance=[10, 7, 1, 2])
    (doubt,) = doubts_about(staged, True)
    assert doubt.startswith("stage 0 has 50% of the model's parameters (0 5%, ")
    assert not doubts_about(staged, True, lambda stages: build("zb-v", 2, 4))
    (doubt,) = doubts_about(cut_model(layers, 4, balance=[10, 1, 1, 8]), True, lambda stages: build("zb-v", 2, 4))
    assert doubt.startswith("stages 0, 3 have 90% of the model's parameters")
    assert "where 50% would be even" in doubt


def test_the_pipeline_warns_where_it_is_constructed() -> None:
    with pytest.warns(CutWarning, match=r"OneLarge: stage 1 has 94%") as found:
        pipe = penstock.Pipeline(OneLarge(), stages=3, microbatches=2, example=(rows(2, W),), loss_fn=square)
    assert found[0].filename == __file__
    with pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipe.step(rows()).loss > 0
