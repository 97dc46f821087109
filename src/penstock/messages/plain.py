"""Plain values as JSON: what ranks tell each other, and what checkpoints hold beside tensors.

Each kind that JSON lacks is written as an object with one key that begins with `$`, so what is read is exactly what
was written, tuples and infinities included, and reading is nothing but a walk over text: it runs no code, whoever wrote
it. Whatever is not in the table below is refused when it is written, by its place and type: an object that only a
pickle could bring back would also bring its code.

Beside the kinds of Python and torch there are records: small types of Penstock's own, each registered with the types
of its fields. Nothing else can be made by reading, and a field of another type is an error.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.errors import PeerFailure, UsageError
from penstock.schedule.action import Action, parse

__all__ = ["TENSOR", "NotPlainError", "decode", "dumps", "encode", "loads", "record", "same", "shortened"]

TENSOR = "$tensor"  # the name of a tensor that was set aside
DEEPEST = 100
LONGEST = 64 * 1024 * 1024  # bytes of one message
LONG_TEXT = 8 * 1024  # characters of an error's message, and twice that of a traceback

SetAside = Callable[[Tensor], str]


class NotPlainError(ValueError):
    """Text that is no plain value: damaged, or written by something else."""


def dumps(value: Any, place: str = "the value") -> bytes:
    """A message for another rank."""
    return json.dumps(_Encoder(None).walk(value, place, 0), separators=(",", ":")).encode()


def loads(content: bytes) -> Any:
    """The value of a message; `NotPlainError` where it is none."""
    if len(content) > LONGEST:
        raise NotPlainError(f"a message of {len(content)} bytes; the longest that is read has {LONGEST}")
    try:
        return decode(json.loads(content), _no_tensor)
    except NotPlainError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        raise NotPlainError(f"a message that cannot be read: {type(error).__name__}: {error}") from error


def _no_tensor(name: str) -> Tensor:
    raise NotPlainError(f"a message names the tensor {name!r}, and messages have none")


def shortened(text: str | None, length: int = LONG_TEXT) -> str | None:
    """A text of at most about this length, without its middle where it is longer."""
    if text is None or len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


# -- records


class _Record(NamedTuple):
    kind: type
    fields: Mapping[str, Any]  # their types
    write: Callable[[Any], dict[str, Any]]
    read: Callable[..., Any]


_RECORDS: dict[str, _Record] = {}
_NAMES: dict[type, str] = {}


def record(kind: type, *, write: Callable[[Any], dict[str, Any]] | None = None, **fields: Any) -> None:
    """Let objects of this type travel: its fields and their types, which are also its constructor's arguments."""

    def of_fields(value: Any) -> dict[str, Any]:
        return {name: getattr(value, name) for name in fields}

    _RECORDS[kind.__name__] = _Record(kind, fields, write or of_fields, kind)
    _NAMES[kind] = kind.__name__


def _read_record(name: str, entries: Any, tensor: Callable[[str], Tensor]) -> Any:
    kind, fields, _, make = _RECORDS[name]
    values = {key: decode(entry, tensor) for key, entry in entries.items()}
    for key, value in values.items():
        fits = key in fields and isinstance(value, fields[key])
        if not fits and not (type(value) is int and isinstance(0.0, fields.get(key, ()))):
            raise NotPlainError(f"a {kind.__name__} whose {key[:40]!r} is a {type(value).__name__}")
    return make(**values)


_WHOLE = int | None
_TEXT = str | None


def _of_failure(failure: PeerFailure) -> dict[str, Any]:
    texts = {
        "cause": shortened(failure.cause),
        "original_traceback": shortened(failure.original_traceback, 2 * LONG_TEXT),
        "report": shortened(failure.report, 2 * LONG_TEXT),
        "action": shortened(failure.action, 100),
    }
    numbers = ("rank", "stage", "microbatch", "replica", "shard")
    return {name: value for name, value in texts.items() if value is not None} | {
        name: value for name in numbers if (value := getattr(failure, name)) is not None
    }


record(
    PeerFailure,
    write=_of_failure,
    rank=int,
    cause=str,
    stage=_WHOLE,
    action=_TEXT,
    microbatch=_WHOLE,
    original_traceback=_TEXT,
    report=_TEXT,
    replica=_WHOLE,
    shard=_WHOLE,
)


# -- writing


def encode(value: Any, set_aside: SetAside, place: str) -> Any:
    """JSON for a value; `set_aside` takes each tensor and names it. `place` is how the user knows the value."""
    return _Encoder(set_aside).walk(value, place, 0)


class _Encoder:
    def __init__(self, set_aside: SetAside | None) -> None:
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
        if type(value) in _NAMES and self._set_aside is None:
            name = _NAMES[type(value)]
            fields = _RECORDS[name].write(value).items()
            return {f"${name}": {key: self.walk(entry, f"{place}.{key}", depth + 1) for key, entry in fields}}
        if isinstance(value, Action):  # before tuples: it is one
            return {"$action": str(value)}
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
        if self._set_aside is None:
            raise UsageError(f"{place} is a tensor; what ranks tell each other are numbers: pass value.tolist()")
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
        kinds = {"$tuple": tuple, "$frozenset": frozenset, "$set": set}
        return {next(mark for mark, kind in kinds.items() if isinstance(value, kind)): entries}

    def _other(self, value: Any, place: str) -> Any:
        if isinstance(value, complex):
            return {"$complex": [self.walk(value.real, place, 0), self.walk(value.imag, place, 0)]}
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if isinstance(value, Path) and self._set_aside is None:
            return {"$path": str(value)}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic) and not isinstance(value, numpy.void):
            return self.walk(value.item(), place, 0)
        if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc" and self._set_aside:
            return {"$array": self._set_aside(torch.from_numpy(value.copy()))}
        raise UsageError(
            f"{place} is a {type(value).__module__}.{type(value).__qualname__}; only plain values (numbers, text, "
            f"lists, dicts) and tensors are saved, so that loading runs no code: save its state_dict() or fields"
        )


# -- reading


def decode(document: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The value that `encode` was given; `tensor` finds what was set aside."""
    if isinstance(document, list):
        return [decode(entry, tensor) for entry in document]
    if not isinstance(document, dict):
        return document
    mark = next(iter(document), "")
    if len(document) != 1 or not mark.startswith("$"):
        return {key: decode(entry, tensor) for key, entry in document.items()}
    if mark in _MARKS:
        return _MARKS[mark](document[mark], tensor)
    if mark[1:] in _RECORDS:
        return _read_record(mark[1:], document[mark], tensor)
    raise NotPlainError(f"a value of kind {mark[:40]!r}, which this Penstock does not know")


def _pairs(entries: Any, tensor: Callable[[str], Tensor]) -> dict[Any, Any]:
    return {decode(key, tensor): decode(entry, tensor) for key, entry in entries}


def _dtype(name: str, _: Any) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise NotPlainError(f"the dtype {name!r}, which torch does not have")
    return found


def _device(name: str, _: Any) -> torch.device:
    try:
        return torch.device(str(name))
    except RuntimeError as error:
        raise NotPlainError(f"the device {str(name)[:40]!r}, which torch does not have") from error


_MARKS: dict[str, Callable[[Any, Callable[[str], Tensor]], Any]] = {
    TENSOR: lambda name, tensor: tensor(name),
    "$array": lambda name, tensor: tensor(name).numpy(),
    "$float": lambda text, _: float(text),
    "$complex": lambda parts, tensor: complex(*(decode(part, tensor) for part in parts)),
    "$tuple": lambda entries, tensor: tuple(decode(entry, tensor) for entry in entries),
    "$set": lambda entries, tensor: {decode(entry, tensor) for entry in entries},
    "$frozenset": lambda entries, tensor: frozenset(decode(entry, tensor) for entry in entries),
    "$dict": lambda entries, tensor: _pairs(entries, tensor),
    "$counter": lambda entries, tensor: Counter(_pairs(entries, tensor)),
    "$bytes": lambda text, _: base64.b64decode(text),
    "$dtype": _dtype,
    "$device": _device,
    "$path": lambda text, _: Path(text),
    "$action": lambda text, _: parse(text),
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
