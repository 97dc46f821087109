"""How batches become microbatches: what cannot work is refused where it is said."""

from __future__ import annotations

from typing import Any

import pytest

import penstock
from penstock import BatchOptions
from penstock.errors import UsageError


@pytest.mark.parametrize(
    "dims", [{"mask": 1}, {0: None, "target": 2}, {"mask": {"inner": [0, None]}}, {"output": (1, 1)}, {}]
)
def test_dimensions_go_by_name_or_position_and_follow_the_shape_of_a_value(dims: Any) -> None:
    assert BatchOptions(dims=dims).dims == dims


@pytest.mark.parametrize("dims", [{"mask": "rows"}, {"mask": 1.5}, {1.5: 0}, {"mask": [0, "one"]}, ["mask"]])
def test_what_is_no_dimension_is_refused(dims: Any) -> None:
    with pytest.raises(UsageError, match=r"dims=.*such as \{'mask': 1\}"):
        BatchOptions(dims=dims)


def test_no_dimensions_are_none_of_any() -> None:
    assert BatchOptions(dims=None).dims == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": 4}, "penstock.by_tokens"),
        ({"order": "length"}, "'size'"),
        ({"inputs": "last"}, "'first'"),
        ({"batch_norm": "global"}, "'deferred'"),
        ({"batch_norm_group": 0}, "a process group of replicas"),
    ],
)
def test_other_values_are_refused_with_those_that_there_are(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        BatchOptions(**options)


def test_options_with_the_same_values_are_equal() -> None:
    assert BatchOptions(inputs="first") == BatchOptions(inputs="first") != BatchOptions()
    assert BatchOptions(split=penstock.by_tokens()).split is not None
