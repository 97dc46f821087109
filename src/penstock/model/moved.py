"""Modules on another device: for good, or with copies in the places of their tensors for as long as these are needed.

A module that is moved by `to` may not fit where it goes, or be in use where it is. With `moved` only what is asked for
has memory there, and the module has its own tensors again afterwards: the same objects, which were never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def move_together(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move modules to a device for good; a tensor that stands in several places stays one.

    On CUDA torch puts other memory below a parameter. On devices that a library of its own has registered it cannot,
    and puts a new parameter into each place, so that tied weights would part.
    """
    modules = list(modules)
    places = list(_places(modules))
    for module in modules:
        module.to(device)
    now: dict[int, Tensor] = {}
    for holder, name, before in places:
        here = getattr(holder, name)
        if now.setdefault(id(before), here) is not here:
            setattr(holder, name, now[id(before)])


@contextmanager
def moved(module: nn.Module, copy: Callable[[Tensor], Tensor]) -> Iterator[list[nn.Parameter]]:
    """Put `copy` of each parameter and buffer in its place; gives the parameters that are trained."""
    before = list(_places([module]))
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


def _places(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield every parameter and buffer with the module that holds it, and its name there."""
    for module in modules:
        for holder in module.modules():
            for table in (holder._parameters, holder._buffers):
                yield from ((holder, name, tensor) for name, tensor in table.items() if tensor is not None)
