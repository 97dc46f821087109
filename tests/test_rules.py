"""The rules for what users pass: a slip shows by its own name and value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.errors import UsageError
from penstock.rules import ArgumentRule, check_count, check_rules, choice, is_count, is_index, is_number


def test_true_is_no_number() -> None:
    assert not is_count(True)
    assert not is_number(True)
    assert not is_index(False, 2)
    assert is_count(0)
    assert is_number(0.5)
    assert not is_number("1")


def test_an_index_is_below_the_count() -> None:
    assert [number for number in range(-1, 4) if is_index(number, 3)] == [0, 1, 2]


@pytest.mark.parametrize("value", [0, -1, 1.0, True, None, "2"])
def test_a_count_is_a_whole_number_of_at_least_one(value: Any) -> None:
    with pytest.raises(UsageError, match="stages must be a whole number of at least 1, got"):
        check_count("stages", value)
    check_count("stages", 1)


def test_none_is_left_out_unless_it_must_be_chosen() -> None:
    rules = {"count": ArgumentRule(is_count, "pass a whole number"), "how": choice("near", "far")}
    check_rules({"count": None, "how": "far"}, rules)
    with pytest.raises(UsageError, match=r"^how=None: choose one of 'near', 'far'$"):
        check_rules({"count": None, "how": None}, rules)


def test_the_owner_and_the_shape_of_a_tensor_are_named() -> None:
    rules = {"count": ArgumentRule(is_count, "pass a whole number")}
    with pytest.raises(UsageError, match=r"^Options\(count=a Tensor of shape \(2, 3\)\): pass a whole number$"):
        check_rules({"count": torch.zeros(2, 3)}, rules, "Options")
