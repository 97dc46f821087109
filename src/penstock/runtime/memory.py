"""How a tensor lies in memory, and a second tensor that lies the same way.

Kernels choose their way by the strides of what they read and by its address: a matrix product of MKL gives other last
bits on some processors when its input starts at another offset within a cache line. So that numbers do not depend on
whether a value was handed over, sent or copied, whatever takes the place of a tensor has its strides and its address
modulo `LINE`. All strides can be kept: where an expanded dimension repeats one element it does so again, and gaps
between the elements stay (their content does not). Tensors that overlap, overlap again: a stage that writes into one
of them sees it in the other, as it would in a plain loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["LINE", "Region", "blank", "blank_like", "copy_like", "elements_in", "once", "phase_of", "regions"]

LINE = 64  # bytes: a cache line, the widest alignment that kernels ask for; what torch allocates starts at one


def phase_of(tensor: Tensor) -> int:
    """Where in a cache line the tensor starts."""
    return tensor.data_ptr() % LINE


def elements_in(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements there are from the first to the last, gaps included."""
    total = 1
    for size, step in zip(shape, stride, strict=True):
        if size == 0:
            return 0
        total += (size - 1) * step
    return total


def blank(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    phase: int = 0,
    device: torch.device | None = None,
) -> Tensor:
    """An empty tensor of these strides that starts at this place of a cache line; no view in the eyes of autograd."""
    skipped = phase // dtype.itemsize  # rounded down: memory of other libraries need not be aligned to its elements
    if not skipped:
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)
    memory = torch.empty(skipped + elements_in(shape, stride), dtype=dtype, device=device)
    return torch.empty(0, dtype=dtype, device=device).set_(memory.untyped_storage(), skipped, shape, stride)


def blank_like(tensor: Tensor) -> Tensor:
    """An empty tensor that lies in memory as this one does."""
    return blank(tensor.shape, tensor.stride(), tensor.dtype, phase_of(tensor), tensor.device)


def once(tensor: Tensor) -> Tensor:
    """A view without the repetitions of expanded dimensions: what there is to copy, from or into."""
    stride = tensor.stride()
    if 0 not in stride:
        return tensor
    return tensor.as_strided(
        [size if step else min(size, 1) for size, step in zip(tensor.shape, stride, strict=True)], stride
    )


def copy_like(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as this one does; gradients go through it unchanged, as through `clone`."""
    if not tensor.data_ptr() % LINE:
        copied = tensor.clone()
        if copied.stride() == tensor.stride():
            return copied
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return _copied(tensor)
    made: Tensor = _Copy.apply(tensor)  # type: ignore[no-untyped-call]
    return made


def _copied(tensor: Tensor) -> Tensor:
    made = blank_like(tensor)
    once(made).copy_(once(tensor.detach()))
    return made


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return _copied(tensor)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class Region(NamedTuple):
    """A stretch of memory in which tensors lie that overlap, or one that overlaps with none."""

    address: int
    nbytes: int
    members: list[int]  # by their places in the list of tensors


def regions(tensors: Iterable[Tensor]) -> list[Region]:
    """The memory that the tensors use, in the order of their first members; each tensor is in one region."""
    stretches = []
    for place, tensor in enumerate(tensors):
        address = tensor.data_ptr()
        nbytes = elements_in(tensor.shape, tensor.stride()) * tensor.element_size()
        stretches.append((str(tensor.device), address, address + nbytes, place))
    found: list[Region] = []
    device, end = "", 0
    for where, start, stop, place in sorted(stretches):
        if found and where == device and start < end and start < stop:
            end = max(end, stop)
            last = found[-1]
            found[-1] = Region(last.address, end - last.address, [*last.members, place])
        else:
            device, end = where, stop
            found.append(Region(start, stop - start, [place]))
    return sorted(found, key=lambda region: min(region.members))
