"""A layout, and the plain values of a message, as bytes.

They travel pickled: the ranks of one process group trust each other, as they do in torch's own object collectives.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from penstock.errors import UsageError
from penstock.runtime.transport.places import Slot

__all__ = ["Content", "dump", "dump_plain", "load", "load_plain"]


class Content(NamedTuple):
    """All that both ends must know of a message."""

    form: type | None
    spec: Any
    slots: tuple[Slot | None, ...]  # None: the leaf is a plain value
    plain: bytes
    device_link: bool  # tensors off the CPU have a link of their own


def dump(content: Content) -> bytes:
    """As text for the peer."""
    return pickle.dumps(content._replace(spec=_take_down(content.spec)))


def load(text: bytes) -> Content:
    """From the text that a peer of this group sent."""
    content: Content = pickle.loads(text)
    return content._replace(spec=_put_up(content.spec))


def dump_plain(values: Sequence[Any]) -> bytes:
    """The plain values as bytes, which compare as Python's `==` does not (1, 1.0 and True; nan)."""
    if all(value is None for value in values):
        return b""
    try:
        return pickle.dumps(values)
    except Exception as error:
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise UsageError(
            f"a value cannot cross to another process: {error} (among values of type {kinds}); "
            "send tensors, None and plain picklable values"
        ) from error


def load_plain(plain: bytes) -> list[Any]:
    """The plain values again."""
    found: list[Any] = pickle.loads(plain)
    return found


def _take_down(spec: Any) -> Any:
    """A tree spec as plain tuples: torch warns when one of its own is unpickled."""
    if spec is None or spec.type is None:
        return None
    return spec.type, spec.context, [_take_down(child) for child in spec.children()]


def _put_up(parts: Any) -> Any:
    if parts is None:
        return pytree.treespec_leaf()
    kind, context, children = parts
    return pytree.TreeSpec(kind, context, [_put_up(child) for child in children])
