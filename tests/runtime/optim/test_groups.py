"""Parameter groups by the names of parameters; what several ranks make of them is in `test_norms`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from runtime.optim.tied_net import model, piped
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.errors import UsageError


def test_a_tied_parameter_of_a_list_goes_by_its_first_name() -> None:
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    stages[1].weight = stages[0].weight
    with penstock.Pipeline(stages, microbatches=2, loss_fn=F.mse_loss) as pipe:
        first, rest = pipe.parameter_groups({"0.weight": {"lr": 1.0}})
        assert [id(p) for p in first["params"]] == [id(stages[0].weight)]
        assert len(rest["params"]) == 2
        with pytest.raises(UsageError, match=r"1\.weight is tied to 0\.weight and goes by that name"):
            pipe.parameter_groups({"1.weight": {"lr": 1.0}})


def test_functions_choose_by_shape() -> None:
    with piped() as pipe:
        flat, rest = pipe.parameter_groups({(lambda name, parameter: parameter.dim() < 2): {"weight_decay": 0.0}})
        assert [p.dim() for p in flat["params"]] == [1, 1, 1]
        assert len(rest["params"]) == 2


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"*.biass": {"lr": 1.0}}, r"'?\*\.biass'? matches none of the model's 5 parameters; among them are .*bias"),
        ({"norn.weight": {}}, r"norn\.weight matches none .* norm\.weight"),
        ({"*": {}, "*.bias": {"lr": 1.0}}, r"\*\.bias: every parameter that it matches is taken by a pattern before"),
        ({"*.bias": 0.1}, r"\*\.bias: its options are 0\.1; pass a dict"),
        ({"*.bias": {"params": []}}, "the option 'params' is filled in here"),
        ({3: {"lr": 1.0}}, "3 is not a pattern of names"),
        ({(): {"lr": 1.0}}, "an empty tuple"),
        (["*.bias"], "got a list; pass a dict of patterns"),
    ],
)
def test_a_pattern_that_decides_nothing_is_an_error(rules: Any, message: str) -> None:
    with piped() as pipe:
        for made in (pipe, copy.deepcopy(model())):
            with pytest.raises(UsageError, match=message):
                penstock.parameter_groups(made, rules)
