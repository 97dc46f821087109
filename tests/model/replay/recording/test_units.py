"""Where a model comes apart: every block in every kind of container, and none that decides by its values."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from model import containers
from model.containers import EVERY, GPT, Entered, Grouped, Looped, Mixture, Towers, batch
from model.nets import square, trains
from tiers import by_turns, mostly_slow
from torch import nn

import penstock
from penstock.model.cut import cut_model
from penstock.model.replay.recording.units import find_units, has_forward
from penstock.model.staged_model import StagedModel


def cut(kind: type[nn.Module], stages: int, balance: object = None) -> StagedModel:
    torch.manual_seed(0)
    return cut_model(kind(), stages, example=(batch(kind)[:2],), balance=balance)  # type: ignore[arg-type]


def shares(staged: StagedModel) -> list[float]:
    """The part of the model's parameters that each stage has."""
    total = sum(parameter.numel() for parameter in staged.model.parameters())
    return [sum(value.numel() for value in part.module.parameters()) / total for part in staged.parts]


@pytest.mark.parametrize(("kind", "stages"), by_turns(EVERY, [2, 4], fast=[(k, 2) for k in EVERY[::3]]))
def test_blocks_in_any_container_are_exact_over_two_steps(kind: type[nn.Module], stages: int) -> None:
    torch.manual_seed(0)
    model, x = kind(), batch(kind)
    assert trains(model, x, stages=stages) < 1e-6  # a CutWarning would be an error here


BALANCES: list[Any] = [None, "parameters", "memory", {"*": 1}]


@pytest.mark.parametrize(
    ("kind", "balance"), by_turns(EVERY, BALANCES, fast=[(k, BALANCES[row % 4]) for row, k in enumerate(EVERY)])
)
def test_no_block_of_any_container_is_in_two_stages_and_none_is_left_with_the_rest(
    kind: type[nn.Module], balance: object
) -> None:
    found = cut(kind, 2, balance)
    assert max(shares(found)) < 0.8
    assert sum(shares(found)) < 1.35, "what is in both is a tied table and gains"
    assert not found.doubts


@pytest.mark.parametrize("tied", [False, True])
def test_measured_blocks_are_in_one_stage_each(tied: bool) -> None:
    """How long each takes is left to the machine; that each is measured, and in one stage, is not."""
    model = GPT(tied)
    staged = cut_model(model, 4, example=(batch(GPT)[:2],), balance="time")
    assert [weight.name for weight in staged.weights if ".h." in weight.name] == [
        f"transformer.h.{number}" for number in range(4)
    ]
    blocks = [{name for name in part.names.values() if ".h." in name} for part in staged.parts]
    assert not any(a & b for a, b in itertools.combinations(blocks, 2))


def test_counts_and_names_count_every_block() -> None:
    by_count = cut_model(GPT(), 2, example=(batch(GPT)[:2],), balance=[3, 5])
    by_name = cut_model(GPT(), 2, example=(batch(GPT)[:2],), split_at=["transformer.h.1"])
    assert by_count.balance == by_name.balance == (3, 5)


@pytest.mark.parametrize("stages", mostly_slow([2, 4], 2))
def test_the_graph_of_a_list_in_a_dict_comes_apart_too(stages: int) -> None:
    options = penstock.CutOptions(method="graph")
    found = cut_model(GPT(), stages, example=(batch(GPT)[:2],), options=options)
    assert max(shares(found)) < 1.5 / stages
    assert not found.doubts


def test_a_container_without_a_forward_is_no_unit() -> None:
    for kind in EVERY:
        model = kind()
        modules = dict(model.named_modules())
        assert all(has_forward(modules[name]) for name in find_units(model)), kind
    assert find_units(Looped()) == [f"blocks.{number}" for number in range(4)], "it goes over its list itself"
    assert [weight.name for weight in cut(Grouped, 4).weights] == [
        f"group.{name}" for name in ("first", "second", "more.last", "rest0", "rest1")
    ]


def test_a_unit_that_is_only_entered_is_opened() -> None:
    staged = cut(Entered, 4)
    names = [set(part.names.values()) for part in staged.parts]
    assert not any(a & b for a, b in itertools.combinations(names, 2))
    assert max(shares(staged)) < 0.5


def test_a_unit_larger_than_a_stage_is_opened() -> None:
    """Swin and its kind: the third of four stages has most blocks."""
    for stages in (2, 4):
        assert max(shares(cut(Towers, stages))) < 1.3 / stages


@pytest.mark.slow
def test_a_unit_that_chooses_by_its_values_stays_in_one_piece() -> None:
    """Experts that are called only where they get tokens: as glue, each microbatch would take a path of its own."""
    staged = cut(Mixture, 4)
    assert {"layers.0", "layers.1"} <= {weight.name for weight in staged.weights}
    torch.manual_seed(0)
    with pytest.warns(penstock.errors.CutWarning, match=r"has \d+% of the model's parameters \(layers\.\d\."):
        assert trains(Mixture(), torch.randn(4, containers.D), stages=4) < 1e-6


class Bare(nn.Module):
    """All its parameters are in a list, and it calls nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


def test_a_model_of_bare_parameters_is_cut_by_its_graph() -> None:
    with pytest.warns(
        penstock.errors.FallbackWarning, match="none of its modules with parameters, all of which it reads itself"
    ):
        pipe = penstock.Pipeline(Bare(), stages=2, microbatches=2, example=(torch.randn(2, 4),), loss_fn=square)
    with pipe:
        assert pipe.step(torch.randn(4, 4)).loss > 0
