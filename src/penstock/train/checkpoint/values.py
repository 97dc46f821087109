"""Plain values as JSON, with their tensors set aside: the state of schedulers, scalers, data and random generators.

A state is what `state_dict()` gave: dicts, lists, numbers, text, tensors. Each kind that JSON lacks is written as an
object with one key that begins with `$`, so what is read is exactly what was written, tuples and infinities included,
and reading is nothing but a walk over text. Whatever is not in the table below is refused when it is saved, by its
place and type: an object that only a pickle could bring back would also bring its code.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.errors import CheckpointError, UsageError

__all__ = ["TENSOR", "decode", "encode", "same"]

TENSOR = "$tensor"  # the name of a tensor that was set aside
DEEPEST = 100


def encode(value: Any, set_aside: Callable[[Tensor], str], place: str) -> Any:
    """JSON for a value; `set_aside` takes each tensor and names it. `place` is how the user knows the value."""
    return _Encoder(set_aside).walk(value, place, 0)


class _Encoder:
    def __init__(self, set_aside: Callable[[Tensor], str]) -> None:
        self._set_aside = set_aside

    def walk(self, value: Any, place: str, depth: int) -> Any:
        if depth > DEEPEST:
            raise UsageError(f"{place}: nested deeper than {DEEPEST} levels, or holds itself; save something flatter")
        if value is None or isinstance(value, (bool, str)):
            return value if value is None or type(value) in (bool, str) else str(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, Tensor):
            return self._tensor(value, place)
        if isinstance(value, Mapping):
            return self._mapping(value, place, depth + 1)
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._sequence(value, place, depth + 1)
        return self._other(value, place)

    def _tensor(self, value: Tensor, place: str) -> Any:
        if isinstance(value, DTensor):
            raise UsageError(
                f"{place} is a DTensor; only parameters and optimizer state may be sharded: save value.full_tensor()"
            )
        return {TENSOR: self._set_aside(value)}

    def _mapping(self, value: Mapping[Any, Any], place: str, depth: int) -> Any:
        if isinstance(value, Counter):
            return {"$counter": self._pairs(value, place, depth)}
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.walk(entry, f"{place}[{key!r}]", depth) for key, entry in value.items()}
        return {"$dict": self._pairs(value, place, depth)}

    def _pairs(self, value: Mapping[Any, Any], place: str, depth: int) -> list[Any]:
        return [
            [self.walk(key, f"a key of {place}", depth), self.walk(entry, f"{place}[{key!r}]", depth)]
            for key, entry in value.items()
        ]

    def _sequence(self, value: Any, place: str, depth: int) -> Any:
        entries = [self.walk(entry, f"{place}[{number}]", depth) for number, entry in enumerate(value)]
        if isinstance(value, list):
            return entries
        return {"$tuple" if isinstance(value, tuple) else "$set": entries}

    def _other(self, value: Any, place: str) -> Any:
        if isinstance(value, complex):
            return {"$complex": [self.walk(value.real, place, 0), self.walk(value.imag, place, 0)]}
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic) and not isinstance(value, numpy.void):
            return self.walk(value.item(), place, 0)
        if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
            return {"$array": self._set_aside(torch.from_numpy(value.copy()))}
        raise UsageError(
            f"{place} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds plain values "
            f"(numbers, text, lists, dicts) and tensors, so that loading runs no code: save its state_dict() or fields"
        )


def decode(document: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The value that `encode` was given; `tensor` finds what was set aside."""
    if isinstance(document, list):
        return [decode(entry, tensor) for entry in document]
    if not isinstance(document, dict):
        return document
    mark = next(iter(document), "")
    if len(document) != 1 or not mark.startswith("$"):
        return {key: decode(entry, tensor) for key, entry in document.items()}
    if mark not in _MARKS:
        raise CheckpointError(f"the checkpoint has a value of kind {mark!r}, which this Penstock does not know")
    return _MARKS[mark](document[mark], tensor)


def _pairs(entries: Any, tensor: Callable[[str], Tensor]) -> dict[Any, Any]:
    return {decode(key, tensor): decode(entry, tensor) for key, entry in entries}


def _dtype(name: str, _: Any) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"the checkpoint names the dtype {name!r}, which torch does not have")
    return found


_MARKS: dict[str, Callable[[Any, Callable[[str], Tensor]], Any]] = {
    TENSOR: lambda name, tensor: tensor(name),
    "$array": lambda name, tensor: tensor(name).numpy(),
    "$float": lambda text, _: float(text),
    "$complex": lambda parts, tensor: complex(*(decode(part, tensor) for part in parts)),
    "$tuple": lambda entries, tensor: tuple(decode(entry, tensor) for entry in entries),
    "$set": lambda entries, tensor: {decode(entry, tensor) for entry in entries},
    "$dict": lambda entries, tensor: _pairs(entries, tensor),
    "$counter": lambda entries, tensor: Counter(_pairs(entries, tensor)),
    "$bytes": lambda text, _: base64.b64decode(text),
    "$dtype": _dtype,
    "$device": lambda text, _: torch.device(text),
}


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, tensors by their bits."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
