"""Plain values as JSON: what ranks tell each other, and what checkpoints hold beside tensors.

Each kind that JSON lacks is written as an object with one key that begins with `$`, so what is read is exactly what was
written, tuples and infinities included, and reading is nothing but a walk over text: it runs no code, whoever wrote it.
What is not in the table below is refused when it is written, by its place and type: an object that only a pickle could
bring back would also bring its code. Beside the kinds of Python and torch there are small types of Penstock's own, each
registered with the types of its fields; a field of another type is an error.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import PeerFailure, UsageError
from penstock.schedule.action import Action, parse

TENSOR = "$tensor"  # the name of a tensor that was set aside
DEEPEST = 100
DTENSOR_MODULE = "torch.distributed.tensor"  # Importing it takes long; whoever has made a DTensor has imported it.
MESSAGE_BYTES = 64 * 1024 * 1024  # The most that is taken.
LONG_TEXT = 8 * 1024  # characters of an error's message, and twice that of a traceback

StoreTensor = Callable[[Tensor], str]


class NotPlainError(ValueError):
    """Text that is no plain value: damaged, or written by something else."""


def dumps(value: Any) -> bytes:
    """Encode a value as a message."""
    return json.dumps(encode(value, None, "the value"), separators=(",", ":")).encode()


def loads(content: bytes) -> Any:
    """Decode the value of a message; raise NotPlainError where it is none."""
    if len(content) > MESSAGE_BYTES:
        raise NotPlainError(f"a message of {len(content)} bytes; the longest that is read has {MESSAGE_BYTES}")
    try:
        return json.loads(content, object_hook=partial(_made, tensor=_no_tensor))
    except NotPlainError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        raise NotPlainError(f"a message that cannot be read: {type(error).__name__}: {error}") from error


def _no_tensor(name: str) -> Tensor:
    raise NotPlainError(f"a message names the tensor {name!r}, but messages contain no tensors")


def shortened(text: str | None, length: int = LONG_TEXT) -> str | None:
    """Cut a text to about this length by leaving out its middle."""
    if text is None or len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


# -- types of our own


class _Registered(NamedTuple):
    kind: type
    fields: Mapping[str, Any]  # Types of the fields.
    write: Callable[[Any], dict[str, Any]]


_REGISTERED: dict[str, _Registered] = {}
_NAMES: dict[type, str] = {}


def register(kind: type, *, write: Callable[[Any], dict[str, Any]] | None = None, **fields: Any) -> None:
    """Let objects of this type travel: its fields and their types, which are also its constructor's arguments."""

    def of_fields(value: Any) -> dict[str, Any]:
        return {name: getattr(value, name) for name in fields}

    _REGISTERED[kind.__name__] = _Registered(kind, fields, write or of_fields)
    _NAMES[kind] = kind.__name__


_TEXTS = {"cause": LONG_TEXT, "original_traceback": 2 * LONG_TEXT, "report": 2 * LONG_TEXT, "action": 100}
_NUMBERS = ("rank", "stage", "microbatch", "replica", "shard")


def _of_failure(failure: PeerFailure) -> dict[str, Any]:
    found = {name: shortened(getattr(failure, name), length) for name, length in _TEXTS.items()}
    found |= {name: getattr(failure, name) for name in _NUMBERS}
    return {name: value for name, value in found.items() if value is not None}


_FIELDS = dict.fromkeys(_TEXTS, str | None) | dict.fromkeys(_NUMBERS, int | None)
register(PeerFailure, write=_of_failure, **(_FIELDS | {"rank": int, "cause": str}))


# -- writing


# A place is how the user knows the outermost value, or the place of a container with how its text goes on, and by what.
Place = str | tuple[Any, str, Any]
_FIELD, _ENTRY, _KEY = "{}.{}", "{}[{!r}]", "a key of {}"


def _text_of(place: Place) -> str:
    return place if isinstance(place, str) else place[1].format(_text_of(place[0]), place[2])


# JSON has these as they are; what is in a container is looked up here before a call.
_AS_THEY_ARE = frozenset({type(None), bool, int, str})


def encode(value: Any, store_tensor: StoreTensor | None, place: Place, depth: int = 0) -> Any:
    """Encode a value as JSON; `store_tensor` takes and names each tensor. `place` is how the user knows the value."""
    kind = type(value)
    if kind in _AS_THEY_ARE or (kind is float and math.isfinite(value)):
        return value
    if depth > DEEPEST:
        raise UsageError(
            f"{_text_of(place)}: nested deeper than {DEEPEST} levels, or holds itself; save something flatter"
        )
    if kind in _NAMES and store_tensor is None:
        name = _NAMES[kind]
        fields = _REGISTERED[name].write(value)
        for key, entry in fields.items():
            if type(entry) not in _AS_THEY_ARE:
                fields[key] = encode(entry, None, (place, _FIELD, key), depth + 1)
        return {f"${name}": fields}
    if isinstance(value, Action):  # An Action is a tuple, so it comes before them.
        return {"$action": str(value)}
    if isinstance(value, Mapping):
        pairs: list[Any] = []
        counts = isinstance(value, Counter)
        by_name = not counts
        for key, entry in value.items():
            by_name = by_name and type(key) is str and not key.startswith("$")
            name = key if type(key) in _AS_THEY_ARE else encode(key, store_tensor, (place, _KEY, key), depth + 1)
            if type(entry) not in _AS_THEY_ARE:
                entry = encode(entry, store_tensor, (place, _ENTRY, key), depth + 1)
            pairs.append([name, entry])
        return dict(pairs) if by_name else {"$counter" if counts else "$dict": pairs}
    if not isinstance(value, (list, tuple, set, frozenset)):
        return _encode_other(value, store_tensor, place)
    if kind is list and {*map(type, value)} == {float} and all(map(math.isfinite, value)):
        return list(value)  # The losses of a step are such a list.
    entries = [
        entry if type(entry) in _AS_THEY_ARE else encode(entry, store_tensor, (place, _ENTRY, number), depth + 1)
        for number, entry in enumerate(value)
    ]
    if isinstance(value, list):
        return entries
    return {"$tuple" if isinstance(value, tuple) else "$set" if isinstance(value, set) else "$frozenset": entries}


def _encode_other(value: Any, store_tensor: StoreTensor | None, place: Place) -> Any:
    """Encode a value that is no container."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, (str, int)):  # Its type is a subclass.
        return str(value) if isinstance(value, str) else int(value)
    if isinstance(value, getattr(sys.modules.get(DTENSOR_MODULE), "DTensor", ())):
        raise UsageError(
            f"{_text_of(place)} is a DTensor; only parameters and optimizer state may be sharded: save "
            f"value.full_tensor()"
        )
    if isinstance(value, Tensor):
        if store_tensor is None:
            raise UsageError(
                f"{_text_of(place)} is a tensor; what ranks tell each other are numbers: pass value.tolist()"
            )
        return {TENSOR: store_tensor(value)}
    if isinstance(value, complex):
        return {"$complex": [_encode_other(value.real, None, place), _encode_other(value.imag, None, place)]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, Path) and store_tensor is None:
        return {"$path": str(value)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and not isinstance(value, numpy.void):
        return encode(value.item(), store_tensor, place)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc" and store_tensor:
        return {"$array": store_tensor(torch.from_numpy(value.copy()))}
    raise UsageError(
        f"{_text_of(place)} is a {type(value).__module__}.{type(value).__qualname__}; only plain values (numbers, "
        f"text, lists, dicts) and tensors are saved, so that loading runs no code: save its state_dict() or fields"
    )


# -- reading


def decode(document: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Decode the value that `encode` was given; `tensor` finds what was set aside."""
    if isinstance(document, list):
        return [decode(entry, tensor) for entry in document]
    if isinstance(document, dict):
        return _made({key: decode(entry, tensor) for key, entry in document.items()}, tensor)
    return document


def _made(entries: dict[str, Any], tensor: Callable[[str], Tensor]) -> Any:
    """Make what an object stands for, whose entries have been decoded by now."""
    mark = next(iter(entries), "")
    if len(entries) != 1 or not mark.startswith("$"):
        return entries
    content = entries[mark]
    if mark in _MAKERS:
        return _MAKERS[mark](content)
    if mark[1:] in _REGISTERED:
        return _read_registered(mark[1:], content)
    if mark == TENSOR:
        return tensor(content)
    if mark == "$array":
        return tensor(content).numpy()
    raise NotPlainError(f"a value of kind {mark[:40]!r}, which this Penstock does not know")


def _read_registered(name: str, values: dict[str, Any]) -> Any:
    kind, fields, _ = _REGISTERED[name]
    for key, value in values.items():
        fits = key in fields and isinstance(value, fields[key])
        if not fits and not (type(value) is int and isinstance(0.0, fields.get(key, ()))):
            raise NotPlainError(f"a {kind.__name__} whose {key[:40]!r} is a {type(value).__name__}")
    return kind(**values)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise NotPlainError(f"the dtype {name!r}, which torch does not have")
    return found


def _device(name: str) -> torch.device:
    try:
        return torch.device(str(name))
    except RuntimeError as error:
        raise NotPlainError(f"the device {str(name)[:40]!r}, which torch does not have") from error


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$complex": lambda parts: complex(*parts),
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$bytes": base64.b64decode,
    "$dtype": _dtype,
    "$device": _device,
    "$path": Path,
    "$action": parse,
}


def same(one: Any, other: Any) -> bool:
    """Return whether two states are equal, tensors by their bits."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
