"""Tensors inside objects that are no pytree.

Such an object would go to every microbatch whole, rows and all, and the loss would count each row as often as there
are microbatches: wrong numbers without a word. So the splitter asks here first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

DEPTH = 3  # objects in objects: further down, nothing is meant as a batch
PLAIN = (int, float, str, bytes, bool, type(None))


def is_array(value: Any) -> bool:
    """Whether it is a numpy array with rows."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.ndim > 0


def hides_tensors(value: Any, depth: int = DEPTH) -> bool:
    """Whether an object has tensors with rows in its attributes or items."""
    if type(value) in PLAIN:
        return False
    return any(
        (isinstance(leaf, Tensor) and leaf.dim() > 0) or (depth > 0 and hides_tensors(leaf, depth - 1))
        for content in _contents(value)
        for leaf in pytree.tree_leaves(content)
    )


def _contents(value: Any) -> Iterator[Any]:
    """Attributes and, of a container, items. What can be called is code, with tensors of its own: a module, a class."""
    if callable(value):
        return
    yield from getattr(value, "__dict__", {}).values()
    for base in type(value).__mro__:
        slots = getattr(base, "__slots__", ())
        yield from (getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots))
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
