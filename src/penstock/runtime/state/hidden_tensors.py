"""Tensors inside of objects that torch does not know as containers.

Such a tensor is easily lost sight of: passed to `step()` it would go to every microbatch whole, rows and all, returned
by a stage it would leave without its gradient, and kept by a stage it may be the memory of an output.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

DEPTH = 4  # of objects in objects that are searched for tensors
BATCH_DEPTH = 3  # further down, nothing is meant as a batch
_PLAIN = (int, float, complex, bool, str, bytes, Enum, type, PurePath, torch.dtype, torch.device, torch.Size)


def is_array(value: Any) -> bool:
    """Whether it is a numpy array with rows."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.ndim > 0


def hides_tensors(value: Any, depth: int = BATCH_DEPTH) -> bool:
    """Whether an object has tensors with rows in its attributes or items; callables are code, and have their own."""
    if value is None or isinstance(value, _PLAIN) or callable(value):
        return False
    return any(
        (isinstance(leaf, Tensor) and leaf.dim() > 0) or (depth > 0 and hides_tensors(leaf, depth - 1))
        for content in _inside(value)
        for leaf in pytree.tree_leaves(content)
    )


def tensors_in(value: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    """The tensors among the attributes and the items of an object; those of modules are looked for by themselves."""
    if isinstance(value, Tensor):
        yield value
    elif not (value is None or isinstance(value, (*_PLAIN, nn.Module)) or depth == 0):
        for each in _inside(value):
            yield from tensors_in(each, depth - 1)


def _inside(value: Any) -> Iterator[Any]:
    """Attributes and, of a container, items."""
    yield from list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        yield from [getattr(value, name, None) for name in ((names,) if isinstance(names, str) else names)]
    if isinstance(value, Mapping):
        yield from list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from list(value)
