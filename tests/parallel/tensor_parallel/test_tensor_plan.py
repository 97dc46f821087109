"""Plans for spread tensors: patterns of names, of which the last that matches decides."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from penstock import TensorPlan
from penstock.errors import UsageError
from penstock.parallel.tensor_parallel.tensor_plan import READY, plan_of


def test_the_last_pattern_that_matches_decides_and_each_module_gets_a_style_of_its_own() -> None:
    own = ColwiseParallel()
    plan = TensorPlan({"layers.*": "rowwise", "layers.1.*": own})
    found = plan.resolve(["layers.0.up", "layers.1.up", "layers.1.down", "head"])
    assert {name: type(style) for name, style in found.items()} == {
        "layers.0.up": RowwiseParallel,
        "layers.1.up": ColwiseParallel,
        "layers.1.down": ColwiseParallel,
    }
    assert len({id(own), id(found["layers.1.up"]), id(found["layers.1.down"])}) == 3


@pytest.mark.parametrize(
    ("styles", "said"),
    [
        ({"layer.*": "colwise"}, r"no module matches 'layer.\*'; the model has, for example, 'layers.0'"),
        ({"layers.0": "columns"}, "the style 'columns': choose one of 'colwise'"),
    ],
)
def test_a_pattern_or_a_style_that_there_is_not(styles: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TensorPlan(styles).resolve(["layers.0"])


def test_a_plan_is_given_as_a_dict_a_plan_or_a_name() -> None:
    assert plan_of(None) is None
    assert plan_of("llama") is READY["llama"]
    assert plan_of({"a": "colwise"}) == TensorPlan({"a": "colwise"})
    with pytest.raises(UsageError, match="or the name of a ready one: 'gpt', 'llama'"):
        plan_of("bert")
