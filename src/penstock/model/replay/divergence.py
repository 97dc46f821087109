"""Errors for a model that takes another path than with its example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.errors import PathError
from penstock.model.replay.recording.nested_values import differ
from penstock.model.replay.recording.unit_calls import Leaf, UnitCall


def stale(what: str) -> PathError:
    """The calls are those of the plan, but a value is needed that it does not bring."""
    return PathError(
        f"the model took another path than with the example: {what}. Its data flow depends on values, random "
        f"numbers, sizes, on which inputs are given, or on the mode; pass an example= that takes this path, make "
        f"the part that decides one unit, or pass a list of stage modules"
    )


def diverged(calls: Sequence[UnitCall], what: str, number: int) -> PathError:
    """Another call, or another result of one, than the plan has in that place."""
    due = f"{calls[number].unit} was due" if number < len(calls) else "no further call was due"
    return PathError(
        f"the model took another path than with the example: as call {number}, {what}, where {due}. Its control "
        f"flow depends on the data, on sizes or on the mode; make the part that decides one unit, or pass a list of "
        f"stage modules"
    )


def check_returned(
    calls: Sequence[UnitCall], number: int, leaves: list[Any], spec: Any, known: list[Any], expected: Any
) -> None:
    """Stages after this one go by what they expect the call to return; it must be what it did return."""
    unit = calls[number].unit
    if spec != expected:
        raise diverged(calls, f"{unit} returned values in another structure", number)
    for place, (leaf, other) in enumerate(zip(leaves, known, strict=True)):
        if isinstance(leaf, Tensor) != isinstance(other, Leaf):
            raise diverged(calls, f"{unit} returned {_named(leaf)} as value {place}", number)
        if isinstance(leaf, Tensor) and tuple(leaf.shape) != other.shape:
            raise diverged(calls, f"{unit} returned a tensor of shape {tuple(leaf.shape)}", number)
        if not isinstance(leaf, Tensor) and differ(leaf, other):
            what = f"{unit} returned {_named(leaf)} instead of {_named(other)} as value {place}"
            raise diverged(calls, f"{what}, which is no tensor and so not sent", number)


def _named(value: Any) -> str:
    return repr(value) if isinstance(value, (int, float, str)) or value is None else f"a {type(value).__name__}"
