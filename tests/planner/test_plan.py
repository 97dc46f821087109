"""What `plan()` takes: a model by name, in memory or as a function, and what it must be told of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from planner_cases import SMALL, Twice
from torch import nn

import penstock
from penstock.errors import UsageError
from penstock.planner.layout import MeshLayout


def test_the_public_function_takes_a_cluster_and_refuses_a_strange_model() -> None:
    found = penstock.plan(
        "gpt", SMALL, batch=8, sequence=16, options={"layers": 4, "width": 32}, layout=MeshLayout(2, 4)
    )
    assert [plan.layout for plan in found.ranked] == [MeshLayout(2, 4)]
    with pytest.raises(UsageError, match="plan\\(\\) takes"):
        penstock.plan("llama", SMALL)


def test_a_module_and_a_function_that_builds_it_are_planned_alike_and_left_alone() -> None:
    model = Twice()
    before = [each.clone() for each in model.parameters()]
    example = (torch.zeros(3, 16),)
    pair = replace(SMALL, hosts=1, devices=2)
    found = [penstock.plan(each, pair, batch=4, example=example, layout=MeshLayout(2)) for each in (model, Twice)]
    assert found[0].best.seconds == found[1].best.seconds
    assert found[0].parameters == sum(each.numel() for each in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))
    with penstock.Pipeline(model, plan=found[0].best, loss_fn=nn.MSELoss(), example=example) as pipe:
        result = pipe.step(torch.ones(4, 16), target=torch.zeros(4, 16))
    assert result.loss.item() == pytest.approx(nn.MSELoss()(model(torch.ones(4, 16)), torch.zeros(4, 16)).item())


def test_a_plan_with_replicas_is_no_plan_for_one_pipeline() -> None:
    """A pipeline without a mesh once ran one replica of a plan for four, without a word."""
    example = (torch.zeros(3, 16),)
    found = penstock.plan(Twice, SMALL, batch=16, example=example, layout=MeshLayout(2, 4))
    with pytest.raises(UsageError, match=r"the plan is for pp 2 x dp 4.*pass mesh=, a DeviceMesh with the axes pp, dp"):
        penstock.Pipeline(Twice(), plan=found.best, loss_fn=nn.MSELoss(), example=example)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "also needs example="),
        ({"example": (1,)}, "example= has no tensor with rows"),
        ({"example": (torch.zeros(2, 16),), "options": {"a": 1}}, "options= are for a model that is named"),
    ],
)
def test_a_module_without_what_shows_its_inputs_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        penstock.plan(Twice(), SMALL, **more)
    with pytest.raises(UsageError, match="needs cluster="):
        penstock.plan(Twice(), example=(torch.zeros(2, 16),))
    with pytest.raises(UsageError, match="a configuration has its own data"):
        penstock.plan("gpt", SMALL, example=(torch.zeros(2, 16),))
