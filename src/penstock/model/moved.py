"""A module with copies in the places of its parameters and buffers, for as long as they are needed elsewhere.

A module that is moved by `to` may not fit where it goes, or be in use where it is. Here only what is asked for has
memory there, and the module has its own tensors again afterwards: the same objects, which were never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def moved(module: nn.Module, copy: Callable[[Tensor], Tensor]) -> Iterator[list[nn.Parameter]]:
    """Put `copy` of each parameter and buffer in its place; gives the parameters that are trained."""
    before = [
        (holder, name, tensor)
        for holder in module.modules()
        for table in (holder._parameters, holder._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    copies: dict[int, Tensor] = {}
    for _, _, tensor in before:
        if id(tensor) not in copies:
            there = copy(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if is_parameter else there
    try:
        # Layers that keep lists of their weights notice a `setattr`.
        for holder, name, tensor in before:
            setattr(holder, name, copies[id(tensor)])
        yield [each for each in copies.values() if isinstance(each, nn.Parameter) and each.requires_grad]
    finally:
        for holder, name, tensor in before:
            setattr(holder, name, tensor)
