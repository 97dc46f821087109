"""Outputs of microbatches become one: what was split is whole again, and what does not fit together is an error."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import ModelError
from penstock.runtime.batch.microbatch import split_batch
from penstock.runtime.batch.outputs import merge


def test_merging_undoes_splitting() -> None:
    value = {"a": torch.randn(7, 2), "b": (torch.randn(7), "text", None)}
    batch = split_batch(3, (value,), {}, None, {}, {})
    merged = merge([args[0] for args in batch.args])
    assert torch.equal(merged["a"], value["a"])
    assert torch.equal(merged["b"][0], value["b"][0])
    assert merged["b"][1:] == ("text", None)


def test_merging_knows_a_dimension_for_each_leaf_and_leaves_that_have_no_rows() -> None:
    table = torch.arange(3)
    outputs = [{"x": torch.full((2, n), n), "table": table.clone()} for n in (1, 2)]
    merged = merge(outputs, {"table": None, "x": 1})
    assert merged["x"].tolist() == [[1, 2, 2], [1, 2, 2]]
    assert torch.equal(merged["table"], table)
    assert merge([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1.0, 2.0]
    assert merge([{"n": 1}, {"n": 2}]) == {"n": [1, 2]}


def test_merging_outputs_of_different_structure_is_an_error() -> None:
    with pytest.raises(ModelError, match="different structure"):
        merge([torch.ones(1), (torch.ones(1), torch.ones(1))])
