"""Errors for a model that takes another path than with its example, or that checkpoints calls of its units.

In the backward a checkpoint calls its function once more. Where that calls a unit of this stage, the unit runs as it
did before. Other stages' units cannot run again, nor can a checkpoint's own forward be without gradients while the
stage's is to have them: what it emits from inside would be cut off from the parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelError, PathError
from penstock.model.replay.recording.nested_values import differ
from penstock.model.replay.recording.unit_calls import Leaf, UnitCall


def stale(what: str) -> PathError:
    return PathError(
        f"the model took another path than with the example: {what}. Its data flow depends on values, random "
        f"numbers, sizes, on which inputs are given, or on the mode; pass an example= that takes this path, make "
        f"the part that decides one unit, or pass a list of stage modules"
    )


def diverged(calls: Sequence[UnitCall], what: str, number: int) -> PathError:
    due = f"{calls[number].unit} was due" if number < len(calls) else "no further call was due"
    return PathError(
        f"the model took another path than with the example: as call {number}, {what}, where {due}. Its control "
        f"flow depends on the data, on sizes or on the mode; make the part that decides one unit, or pass a list of "
        f"stage modules"
    )


def check_returned(
    calls: Sequence[UnitCall], number: int, leaves: list[Any], spec: Any, known: list[Any], expected: Any
) -> None:
    """Refuse a call that did not return what stages after this one go by."""
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


_APPLY: Any = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def cannot_repeat(name: str) -> ModelError:
    return ModelError(
        f"the model's code checkpoints the call of {name}, and so code of other stages with it; let the unit "
        f"checkpoint itself, in its own forward, or leave that to Pipeline(recompute='always')"
    )


def check_reentrant(name: str, with_gradients: bool) -> None:
    """Refuse a call of a unit inside of a function that runs without gradients and puts them in later."""
    if not with_gradients or torch.is_grad_enabled():
        return
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            raise ModelError(
                f"the model's code calls {name} inside of a torch.autograd.Function (a checkpoint with "
                f"use_reentrant=True, a reversible network), which hides the gradients of what this stage sends on; "
                f"pass use_reentrant=False, or let that function and what it calls be one module"
            )
        frame = frame.f_back
