"""Tensors inside of objects that torch does not know as containers are found, down to a stated depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.runtime.state.hidden_tensors import BATCH_DEPTH, DEPTH, hides_tensors, is_array, tensors_in


@dataclass
class Held:
    value: Any


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def nested(depth: int, value: Any) -> Any:
    for _ in range(depth):
        value = Held(value)
    return value


@pytest.mark.parametrize("wrap", [Held, Slotted, lambda value: Held({"a": [value]}), lambda value: Held((1, value))])
def test_a_tensor_is_found_in_attributes_slots_and_items(wrap: Any) -> None:
    tensor = torch.ones(2)
    assert hides_tensors(wrap(tensor))
    assert [each is tensor for each in tensors_in(wrap(tensor))] == [True]


@pytest.mark.parametrize(
    "value", [None, 3, "text", torch.float32, Held("text"), Held(torch.tensor(1.0)), nn.Linear(2, 2)]
)
def test_plain_values_single_numbers_and_callables_hide_no_rows(value: Any) -> None:
    assert not hides_tensors(value)


def test_the_search_ends_at_its_depth() -> None:
    tensor = torch.ones(2)
    assert hides_tensors(nested(BATCH_DEPTH + 1, tensor))
    assert not hides_tensors(nested(BATCH_DEPTH + 2, tensor))
    assert list(tensors_in(nested(DEPTH, tensor))) != []
    assert list(tensors_in(nested(DEPTH + 1, tensor))) == []


def test_tensors_of_modules_are_looked_for_by_themselves() -> None:
    assert list(tensors_in(Held(nn.Linear(2, 2)))) == []


def test_an_array_has_rows() -> None:
    assert is_array(np.ones(3))
    assert not is_array(np.float64(3))
    assert not is_array([1, 2])
