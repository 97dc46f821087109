"""Errors for a model that takes another path than with its example."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import ModelError
from penstock.model.replay.recording.calls import UnitCall

__all__ = ["diverged", "stale"]


def stale(what: str) -> ModelError:
    """The calls are those of the plan, but a value is needed that it does not bring."""
    return ModelError(
        f"the model took another path than with the example: {what}. Its data flow depends on values, random "
        f"numbers, sizes, on which inputs are given, or on the mode; pass an example= that takes this path, make "
        f"the part that decides one unit, or pass a list of stage modules"
    )


def diverged(calls: Sequence[UnitCall], what: str, number: int) -> ModelError:
    """Another call, or another result of one, than the plan has in that place."""
    due = f"{calls[number].unit} was due" if number < len(calls) else "no further call was due"
    return ModelError(
        f"the model took another path than with the example: as call {number}, {what}, where {due}. Its control "
        f"flow depends on the data, on sizes or on the mode; make the part that decides one unit, or pass a list of "
        f"stage modules"
    )
