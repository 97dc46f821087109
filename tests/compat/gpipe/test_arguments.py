"""What a GPipe is given, looked at before anything is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat.gpipe.plain import layers, rows
from torch import nn
from torch.autograd import forward_ad

import penstock
from penstock.errors import ModelError, UsageError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": [2, 2]}, "sums to 4, but the model has 6 layers"),  # sizes that do not add up
        ({"balance": [2, 2, 4]}, "sums to 8, but the model has 6 layers"),
        ({"balance": [6, 0]}, "at least 1 layer"),
        ({"balance": 7}, "7 stages"),
        ({"balance": 0}, "number of stages"),
        ({"balance": "speed"}, "choose one of"),
        ({"balance": [3, 3], "stages": 3}, "how many stages"),
        ({"balance": [3, 3], "devices": ["cpu"]}, "how many stages"),
        ({"devices": ["nowhere"]}, "one device for each stage"),
        ({"chunks": 0}, "chunks=0"),
        ({"chunks": 2.0}, "whole number"),
        ({"checkpoint": "sometimes"}, "'always', 'except_last', 'never'"),
        ({"timeout": -1}, "above 0"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ModelError, UsageError), match=message):
        penstock.GPipe(layers(), **options)


def test_a_label_of_batch_dims_that_nothing_has_is_named() -> None:
    pipe = penstock.GPipe(layers(), balance=2, batch_options=penstock.BatchOptions(dims={"masc": 1}))
    with pytest.raises(UsageError, match="dims names 'masc'"):
        pipe(rows())


def test_what_is_no_module_is_named() -> None:
    """A module was called that is no class, and a model with one child had a balance of 100."""
    for model, message in [
        ([nn.Linear(8, 8)], "nn.Sequential"),
        (nn.ModuleList([nn.Linear(8, 8)]), "no forward"),
        (nn.Sequential(), "empty"),
        (nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8)), "lazy layers"),
        (penstock.GPipe(layers(), balance=2), "GPipe already"),
        (nn.Sequential(nn.Linear(8, 8, device="meta"), nn.Linear(8, 8)), "without values"),
        (len, "wraps an nn.Module"),
    ]:
        with pytest.raises(ModelError, match=message):
            penstock.GPipe(model)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="sums to 100, but the model has 1 layers"):
        penstock.GPipe(nn.Sequential(layers()), balance=[50, 50])


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, in make_dual
def test_tangents_are_refused_and_not_lost() -> None:
    pipe, x = penstock.GPipe(layers(), balance=2, chunks=2), rows()
    with forward_ad.dual_level():
        with pytest.raises(UsageError, match="no forward-mode gradients"):
            pipe(forward_ad.make_dual(x, x))
        pipe(x)


def test_devices_may_be_any_iterable_and_moves_are_refused_alike() -> None:
    pipe = penstock.GPipe(layers(), balance=2, devices=(name for name in ["cpu", "cpu"]))
    assert pipe.devices == [torch.device("cpu")] * 2
    for move in (pipe.cpu, pipe.cuda, lambda: pipe.to("cpu")):
        with pytest.raises(UsageError, match="its stages on cpu, cpu"):
            move()
    free = penstock.GPipe(layers(), balance=2)
    if free.devices is None:
        assert free.cpu() is free


@pytest.mark.parametrize("options", [{"inputs": "first"}, {"split": penstock.by_tokens(4)}])
def test_options_of_batches_that_only_a_pipeline_has(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="for a Pipeline"):
        penstock.GPipe(layers(), balance=2, batch_options=penstock.BatchOptions(**options))  # type: ignore[arg-type]
