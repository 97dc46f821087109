"""A layout, and the plain values of a message, as bytes.

Layouts travel as plain values (see `plain`), of which reading makes nothing but what is registered: containers that
this process has registered with torch's pytree too, and named tuples that it knows. The values beside the tensors that
are plain travel so; the others, such as an enum or an object, are pickled, as torch's own object collectives do, with
the code of the run's secret. Without a secret, a pickle is read only where the kernel says that its sender is a process
of the same user; torch.distributed knows nothing of its peers.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import MessageError, UsageError
from penstock.runtime.messages import plain
from penstock.runtime.messages.secret import signed, unsigned
from penstock.runtime.transport.layout.tensor_places import Slot

_PLAIN, _PICKLED = b"J", b"P"
_SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_CONTAINERS = (tuple, list, set, frozenset)
_FORMS: dict[str, type | None] = {"": None, "tensor": Tensor, "tuple": tuple, "list": list}
_NAMES = {form: name for name, form in _FORMS.items()}
_KEY = b"a value of a stage"
NO_PICKLES = "a pickled value came over torch.distributed in a run without a secret, where anybody may have sent it"


class Content(NamedTuple):
    """All that both ends must know of a message."""

    form: type | None
    spec: Any
    slots: tuple[Slot | None, ...]  # None: the leaf is a plain value
    plain: bytes
    device_link: bool  # tensors off the CPU have a link of their own


def dump(content: Content) -> bytes:
    """Write it as text for the peer."""
    slots = [None if slot is None else tuple(slot) for slot in content.slots]
    return plain.dumps((_NAMES[content.form], _take_down(content.spec), slots, content.plain, content.device_link))


def load(text: bytes, is_known: bool) -> Content:
    """Read the text of a peer; only one that is known to be of this run, or of this user, may send pickles."""
    try:
        form, spec, slots, values, device_link = plain.loads(text)
        made = tuple(None if slot is None else _slot(*slot) for slot in slots)
        if values[:1] == _PICKLED and not is_known:
            raise ValueError(NO_PICKLES)
        return Content(_FORMS[form], _put_up(spec, is_known), made, bytes(values), bool(device_link))
    except (plain.NotPlainError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise MessageError(f"a layout came that cannot be read: {error}") from error


def is_pickled(content: Content) -> bool:
    """Return whether something of it has no plain form."""
    return content.plain[:1] == _PICKLED or _has_pickle(content.spec)


def _has_pickle(spec: Any) -> bool:
    if spec is None or spec.type is None:
        return False
    is_plain = isinstance(spec.context, type) or _is_plain(spec.context)
    return not is_plain or any(map(_has_pickle, spec.children()))


def _slot(shape: Any, dtype: Any, requires_grad: Any, device: Any, stride: Any, *places: Any) -> Slot:
    numbers = (*shape, *stride, *places)
    if not isinstance(dtype, torch.dtype) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"a tensor of {dtype} with sizes and places {numbers}")
    return Slot(torch.Size(shape), dtype, bool(requires_grad), str(device), tuple(stride), *places)


# -- values


def dump_plain(values: Sequence[Any]) -> bytes:
    """Write the plain values as bytes, which compare as Python's `==` does not (1, 1.0 and True; nan)."""
    return b"" if all(value is None for value in values) else _dump_value(list(values))


def load_plain(content: bytes) -> list[Any]:
    """Read the plain values again."""
    found: list[Any] = _load_value(content)
    return found


def _dump_value(value: Any) -> bytes:
    if _is_plain(value):
        return _PLAIN + plain.dumps(value)
    try:
        return _PICKLED + signed(pickle.dumps(value), _KEY)
    except Exception as error:
        kinds = ", ".join(sorted({type(each).__name__ for each in (value if isinstance(value, list) else [value])}))
        raise UsageError(
            f"a value cannot cross to another process: {error} (among values of type {kinds}); "
            "send tensors, None and plain picklable values"
        ) from error


def _load_value(content: bytes) -> Any:
    if content[:1] == _PLAIN:
        return plain.loads(content[1:])
    pickled = unsigned(content[1:], _KEY)
    if pickled is None:
        raise MessageError("a value came that no rank of this run has sent: its code is wrong")
    return pickle.loads(pickled)


def _is_plain(value: Any) -> bool:
    """Return whether it comes back as it was: exactly of these types, and not of one that is derived from them."""
    kind = type(value)
    if kind in _SIMPLE:
        return True
    if kind is dict:
        return all(_is_plain(key) and _is_plain(entry) for key, entry in value.items())
    return kind in _CONTAINERS and all(map(_is_plain, value))


# -- containers


def _take_down(spec: Any) -> Any:
    """Write a tree spec as plain values."""
    if spec is None or spec.type is None:
        return None
    context = {"type": _name(spec.context)} if isinstance(spec.context, type) else {"value": _dump_value(spec.context)}
    return _name(spec.type), context, [_take_down(child) for child in spec.children()]


def _put_up(parts: Any, is_known: bool) -> Any:
    if parts is None:
        return pytree.treespec_leaf()
    name, context, children = parts
    kind = next((known for known in pytree.SUPPORTED_NODES if _name(known) == name), None)
    if kind is None:
        raise ValueError(f"a container {name!r}, which is not registered with torch's pytree here")
    if "value" in context and context["value"][:1] == _PICKLED and not is_known:
        raise ValueError(NO_PICKLES)
    found = _load_value(context["value"]) if "value" in context else _known_type(context["type"])
    return pytree.TreeSpec(kind, found, [_put_up(child, is_known) for child in children])


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _known_type(name: str) -> type:
    """Find a named tuple, or a registered container, that this process has loaded; nothing is imported for it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # a lazy module would import by getattr
    is_named_tuple = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")
    if isinstance(found, type) and (is_named_tuple or found in pytree.SUPPORTED_NODES):
        return found
    raise ValueError(f"the type {name!r}, which is neither a named tuple nor a container that is known here")
