"""Plain values as JSON: what ranks tell each other, and what checkpoints hold beside tensors.

Each kind that JSON lacks is written as an object with one key that begins with `$`, so what is read is exactly what
was written, tuples and infinities included, and reading is nothing but a walk over text: it runs no code, whoever wrote
it. Whatever is not in the table below is refused when it is written, by its place and type: an object that only a
pickle could bring back would also bring its code.

Beside the kinds of Python and torch there are small types of Penstock's own, each registered with the types of its
fields. Nothing else can be made by reading, and a field of another type is an error.
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
# It takes as long to import as torch itself; whoever has made a DTensor has imported it.
DTENSOR_MODULE = "torch.distributed.tensor"
MESSAGE_BYTES = 64 * 1024 * 1024  # The most that is taken.
LONG_TEXT = 8 * 1024  # characters of an error's message, and twice that of a traceback

StoreTensor = Callable[[Tensor], str]


class NotPlainError(ValueError):
    """Text that is no plain value: damaged, or written by something else."""


def dumps(value: Any, place: str = "the value") -> bytes:
    """Encode a value as a message; `place` is how the user knows the value, for an error."""
    try:
        document = _encoded(value, None, 0)
    except _Unfit as unfit:
        raise UsageError(unfit.sentence(place)) from None
    return json.dumps(document, separators=(",", ":")).encode()


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
    """Shorten a text to about this length by leaving out its middle."""
    if text is None or len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


# -- types of our own


class _Registered(NamedTuple):
    kind: type
    fields: Mapping[str, Any]  # Types of the fields.
    write: Callable[[Any], dict[str, Any]]
    read: Callable[..., Any]


_REGISTERED: dict[str, _Registered] = {}
_NAMES: dict[type, str] = {}


def register(kind: type, *, write: Callable[[Any], dict[str, Any]] | None = None, **fields: Any) -> None:
    """Let objects of this type travel: its fields and their types, which are also its constructor's arguments."""

    def of_fields(value: Any) -> dict[str, Any]:
        return {name: getattr(value, name) for name in fields}

    _REGISTERED[kind.__name__] = _Registered(kind, fields, write or of_fields, kind)
    _NAMES[kind] = kind.__name__


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


register(
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


class _Unfit(Exception):
    """A value that has no plain form, on its way out of the containers around it."""

    def __init__(self, why: str) -> None:
        self.why = why
        # The way from the outermost container to the value; "{}" is the place of the container.
        self.steps: list[str] = []

    def inside(self, step: str) -> _Unfit:
        self.steps.insert(0, step)
        return self

    def sentence(self, place: str) -> str:
        """Describe what is wrong, with the place of the value as the user knows it."""
        for step in self.steps:
            place = step.replace("{}", place, 1)
        return f"{place}{self.why}"


def encode(value: Any, store_tensor: StoreTensor | None, place: str) -> Any:
    """Encode a value as JSON; `store_tensor` takes and names each tensor. `place` is how the user knows the value."""
    try:
        return _encoded(value, store_tensor, 0)
    except _Unfit as unfit:
        raise UsageError(unfit.sentence(place)) from None


# JSON has these as they are; what is in a container is looked up here before a call.
_AS_THEY_ARE = frozenset({type(None), bool, int, str})


def _encoded(value: Any, store_tensor: StoreTensor | None, depth: int) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE or (kind is float and math.isfinite(value)):
        return value
    if depth > DEEPEST:
        raise _Unfit(f": nested deeper than {DEEPEST} levels, or holds itself; save something flatter")
    if kind in _NAMES and store_tensor is None:
        name = _NAMES[kind]
        fields = {}
        for key, entry in _REGISTERED[name].write(value).items():
            try:
                fields[key] = entry if type(entry) in _AS_THEY_ARE else _encoded(entry, None, depth + 1)
            except _Unfit as unfit:
                raise unfit.inside(f"{{}}.{key}") from None
        return {f"${name}": fields}
    if isinstance(value, Action):  # An Action is a tuple, so it comes before them.
        return {"$action": str(value)}
    if isinstance(value, Mapping):
        return _encoded_mapping(value, store_tensor, depth + 1)
    if not isinstance(value, (list, tuple, set, frozenset)):
        return _encoded_other(value, store_tensor)
    if kind is list and {*map(type, value)} == {float} and all(map(math.isfinite, value)):
        return list(value)  # The losses of a step are such a list.
    entries = []
    for number, entry in enumerate(value):
        try:
            entries.append(entry if type(entry) in _AS_THEY_ARE else _encoded(entry, store_tensor, depth + 1))
        except _Unfit as unfit:
            raise unfit.inside(f"{{}}[{number}]") from None
    if isinstance(value, list):
        return entries
    return {"$tuple" if isinstance(value, tuple) else "$set" if isinstance(value, set) else "$frozenset": entries}


def _encoded_mapping(value: Mapping[Any, Any], store_tensor: StoreTensor | None, depth: int) -> Any:
    counts = isinstance(value, Counter)
    by_name = not counts
    for key in value:
        by_name = by_name and type(key) is str and not key.startswith("$")
    pairs: list[Any] = []
    for key, entry in value.items():
        step = "a key of {}"
        try:
            name = key if type(key) in _AS_THEY_ARE else _encoded(key, store_tensor, depth)
            step = f"{{}}[{key!r}]"
            pairs.append([name, entry if type(entry) in _AS_THEY_ARE else _encoded(entry, store_tensor, depth)])
        except _Unfit as unfit:
            raise unfit.inside(step) from None
    return dict(pairs) if by_name else {"$counter" if counts else "$dict": pairs}


def _encoded_other(value: Any, store_tensor: StoreTensor | None) -> Any:
    """Encode a value that is no container."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, (str, int)):  # Its type is a subclass.
        return str(value) if isinstance(value, str) else int(value)
    if isinstance(value, getattr(sys.modules.get(DTENSOR_MODULE), "DTensor", ())):
        raise _Unfit(" is a DTensor; only parameters and optimizer state may be sharded: save value.full_tensor()")
    if isinstance(value, Tensor):
        if store_tensor is None:
            raise _Unfit(" is a tensor; what ranks tell each other are numbers: pass value.tolist()")
        return {TENSOR: store_tensor(value)}
    if isinstance(value, complex):
        return {"$complex": [_encoded_other(value.real, None), _encoded_other(value.imag, None)]}
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
        return _encoded(value.item(), store_tensor, 0)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc" and store_tensor:
        return {"$array": store_tensor(torch.from_numpy(value.copy()))}
    raise _Unfit(
        f" is a {type(value).__module__}.{type(value).__qualname__}; only plain values (numbers, text, lists, dicts) "
        f"and tensors are saved, so that loading runs no code: save its state_dict() or fields"
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
    kind, fields, _, make = _REGISTERED[name]
    for key, value in values.items():
        fits = key in fields and isinstance(value, fields[key])
        if not fits and not (type(value) is int and isinstance(0.0, fields.get(key, ()))):
            raise NotPlainError(f"a {kind.__name__} whose {key[:40]!r} is a {type(value).__name__}")
    return make(**values)


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
