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
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

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


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill its memory without gaps and overlaps, in whatever order."""
    if tensor.is_contiguous():
        return True
    due = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if step != due:
                return False
            due *= size
    return True


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
    if not is_plain(tensor) or tensor.is_nested:
        return tensor.clone()
    if not tensor.data_ptr() % LINE:
        copied = tensor.clone()
        if copied.stride() == tensor.stride():
            return copied
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return _copied(tensor)
    made: Tensor = _CopyFunction.apply(tensor)  # type: ignore[no-untyped-call]
    return made


def _copied(tensor: Tensor) -> Tensor:
    made = blank_like(tensor)
    once(made).copy_(once(tensor.detach()))
    return made


class _CopyFunction(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return _copied(tensor)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same, numbers that are none and -0.0 included."""
    if not (is_plain(one) and is_plain(other)) or one.is_nested or one.is_meta:
        return True  # nobody can tell
    return torch.equal(_octets(one), _octets(other))


def _octets(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


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


# -- copies of several tensors


def is_plain(tensor: Any) -> TypeGuard[Tensor]:
    """Whether it is an ordinary tensor with strides, and no subclass that may keep its numbers elsewhere."""
    return (type(tensor) is Tensor or type(tensor) is Parameter) and tensor.layout is torch.strided


def more_than_numbers(tensor: Tensor) -> str | None:
    """What a tensor is that cannot be handed over, because it is more than a dense block of numbers; else None."""
    kind = type(tensor)
    if tensor.is_nested:
        return "nested tensor"
    return None if kind is Tensor or kind is Parameter else f"{kind.__module__}.{kind.__qualname__}"


def storage_of(tensor: Tensor) -> int:
    """What tells storages apart; tensors that share memory have the same one."""
    return int(tensor.untyped_storage()._cdata)


def copies(tensors: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """Copies of some tensors, laid out as they are; and whether any of them overlap that no longer do as copies.

    Tensors that lie in the memory of one of the others, as views of it do, are made anew as views of its copy.
    """
    found = [tensor if is_plain(tensor) else tensor.clone() for tensor in tensors]
    together: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if is_plain(tensor):
            together.setdefault(storage_of(tensor), []).append(place)
    parted = False
    for places in together.values():
        covers: list[Tensor] = []
        while places:
            cover = max((tensors[place] for place in places), key=_reach)
            parted = parted or any(_overlap(cover, other) for other in covers)
            covers.append(cover)
            made, rest = copy_like(cover), []
            for place in places:
                again = _within(tensors[place], cover, made)
                if again is None:
                    rest.append(place)
                else:
                    found[place] = again
            places = rest
    return found, parted


def with_copies(leaves: list[Any], places: Sequence[int]) -> tuple[list[Any], bool]:
    """The leaves with copies in some places, and whether these were parted."""
    copied, parted = copies([leaves[place] for place in places])
    exchanged = dict(zip(places, copied, strict=True))
    return [exchanged.get(place, leaf) for place, leaf in enumerate(leaves)], parted


def _reach(tensor: Tensor) -> tuple[bool, int]:
    """Which of several tensors of a storage the others may be views of: one that wants a gradient, the largest."""
    return tensor.requires_grad, tensor.numel()


def _within(tensor: Tensor, cover: Tensor, made: Tensor) -> Tensor | None:
    """The tensor as a view of a copy of `cover`, if all of its memory is there."""
    if tensor is cover:
        return made
    if tensor.dtype is not cover.dtype or (tensor.requires_grad and not cover.requires_grad):
        return None
    begin, end = _extent(tensor)
    first, last = _extent(cover)
    if not (first <= begin and end <= last and last - first == cover.numel()):  # no gaps that are not copied
        return None
    source = made if tensor.requires_grad else made.detach()
    return source.as_strided(tensor.shape, tensor.stride(), source.storage_offset() + begin - first)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first element of the storage that the tensor uses, and the one behind the last."""
    begin = int(tensor.storage_offset())
    return begin, begin + elements_in(tensor.shape, tensor.stride())


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a storage have an element in common."""
    if one.dtype is not other.dtype:
        return True
    (begin, end), (first, last) = _extent(one), _extent(other)
    if end <= first or last <= begin:
        return False
    low = min(begin, first)
    used = torch.zeros(max(end, last) - low, dtype=torch.bool, device="cpu")
    used.as_strided(one.shape, one.stride(), begin - low).fill_(True)
    return bool(used.as_strided(other.shape, other.stride(), first - low).any())
