"""Where the tensors of a message lie: with their sender, under way, and with whoever receives them.

They arrive as they lay: same strides, same place in a cache line, and those that overlap overlap (`memory_layout`). A
region, the memory of one tensor or of several that overlap, travels as it is where it has no gaps: in the frame, or,
from `DIRECT_BYTES` on, as a message of its own from and into its final memory; or with all others on its device, by the
device's link. Of a region with gaps (a column of a matrix) the elements travel close together and are spread when they
have come. All of this follows from the slots, so that both ends agree without another word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.runtime.state.memory_layout import LINE, blank, blank_like, elements_in, once, phase_of, regions

HEADER_BYTES = 64
DIRECT_BYTES = 1024 * 1024


class Slot(NamedTuple):
    """One tensor of a message."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    device: str  # the type: each end knows its own index
    stride: tuple[int, ...]
    phase: int  # bytes from the start of a cache line
    region: int
    start: int  # bytes from the start of the region


class Copy(NamedTuple):
    """The elements of one tensor, as they lie under way; those of an expanded dimension once."""

    leaf: int  # The tensor's place in the value.
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # bytes from the start of what carries them: the frame, or a message of their own


class PlacedRegion(NamedTuple):
    """One region: its memory with the receiver, and what carries its content there."""

    slots: dict[int, Slot]  # Indexed by the tensor's place in the value.
    nbytes: int
    phase: int
    spread: bool  # Its elements lie close together under way.
    direct: bool  # It has a message of its own.
    on_link: bool  # It travels by a device's link.
    offset: int  # bytes from the start of what carries it
    carried: int  # bytes
    copies: list[Copy]

    @property
    def device(self) -> str:
        """Where its tensors are with the sender."""
        return next(iter(self.slots.values())).device

    @property
    def settled(self) -> bool:
        """Whether it is one tensor whose final memory is in the frame, as most are."""
        return len(self.slots) == 1 and not self.direct and not self.spread and self.device == "cpu"

    def take(self, leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the bytes of its own message, and the tensor in whose memory they are, if they are not copied."""
        first = next(leaf for leaf, slot in self.slots.items() if not slot.start)
        tensor = leaves[first].detach()
        if not (self.spread or tensor.is_conj() or tensor.is_neg()):
            return _octets(tensor, self.nbytes), tensor
        if self.spread:
            carrier = torch.empty(self.carried, dtype=torch.uint8, device=tensor.device)
            for copy in self.copies:
                view(carrier, copy).copy_(once(leaves[copy.leaf].detach()))
            return carrier, None
        resolved = blank_like(tensor)
        once(resolved).copy_(once(tensor))
        return _octets(resolved, self.nbytes), None

    def make_carrier(self, device: torch.device | None = None) -> Tensor:
        """Allocate what its own message is received into: its final memory, where it has not yet to be spread."""
        return blank((self.carried,), (1,), torch.uint8, 0 if self.spread else self.phase, device)

    def settle(self, carrier: Tensor, device: torch.device | None) -> dict[int, Tensor]:
        """Make its tensors, by their places in the value, in the memory that carries them or in their own."""
        moves = device is not None and carrier.is_cpu and self.device != "cpu"
        if not (self.spread or moves):
            return self._members(carrier, self.offset)
        memory = blank((self.nbytes,), (1,), torch.uint8, self.phase, device if moves else carrier.device)
        made = self._members(memory, 0)
        for copy in self.copies:
            once(made[copy.leaf]).copy_(view(carrier, copy))
        return made

    def _members(self, memory: Tensor, offset: int) -> dict[int, Tensor]:
        if len(self.slots) == 1:
            ((leaf, slot),) = self.slots.items()
            return {leaf: _at(memory, slot.dtype, slot.shape, slot.stride, offset)}
        # Like views of one tensor that were detached, they count writes together.
        base = _at(memory, torch.uint8, (self.nbytes,), (1,), offset)
        made = {}
        for leaf, slot in self.slots.items():
            size = slot.dtype.itemsize
            start = (base.storage_offset() + slot.start) // size
            made[leaf] = base[:size].view(slot.dtype).as_strided(slot.shape, slot.stride, start).detach()
        return made


def view(carrier: Tensor, copy: Copy) -> Tensor:
    """View the elements as they lie under way."""
    return _at(carrier, copy.dtype, copy.shape, copy.stride, copy.offset)


def _at(memory: Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """Make a tensor at that byte of the memory. `set_` makes it no view in the eyes of autograd."""
    start = (memory.storage_offset() + offset) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), start, shape, stride)


def _octets(tensor: Tensor, nbytes: int) -> Tensor:
    """View the memory from where the tensor starts, whatever its dtype: gloo and NCCL do not know them all."""
    start = tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), start, (nbytes,), (1,)
    )


def slots_of(leaves: Sequence[Tensor]) -> list[Slot]:
    """Note how the tensors lie. One that stands for the conjugate or negative of its memory shares it with none."""
    alone = {
        place
        for place, leaf in enumerate(leaves)
        if leaf.is_conj() or leaf.is_neg() or leaf.data_ptr() % leaf.element_size()
    }
    shared = [place for place in range(len(leaves)) if place not in alone]
    found = {place: (len(leaves) + place, 0) for place in alone}  # region and start
    for number, region in enumerate(regions(leaves[place] for place in shared)):
        for place in (shared[member] for member in region.members):
            found[place] = number, leaves[place].data_ptr() - region.address
    return [
        Slot(leaf.shape, leaf.dtype, leaf.requires_grad, leaf.device.type, leaf.stride(), phase_of(leaf), *found[place])
        for place, leaf in enumerate(leaves)
    ]


def arrange(slots: Sequence[Slot | None], device_link: bool, all_packed: bool) -> tuple[list[PlacedRegion], int, int]:
    """Arrange the regions of a message; return them, the size of its frame, and of its payload on a device's link.

    With `device_link`, tensors off the CPU travel on a link of their own, all in one payload: that is their memory,
    where there is one, and else a packed copy. `all_packed`: nothing else is direct.
    """
    members: dict[int, dict[int, Slot]] = {}
    for leaf, slot in enumerate(slots):
        if slot is not None:
            members.setdefault(slot.region, {})[leaf] = slot
    placed, end, device_end = [], HEADER_BYTES, 0
    for slots_of_region in members.values():
        region = _arrange_region(slots_of_region, whole_lines(end), whole_lines(device_end), device_link, all_packed)
        if region.on_link:
            device_end = region.offset + region.carried
        elif not region.direct:
            end = region.offset + region.carried
        placed.append(region)
    alone = [place for place, region in enumerate(placed) if region.on_link]
    if len(alone) == 1:
        region = placed[alone[0]]
        moved = [copy._replace(offset=copy.offset - region.offset) for copy in region.copies]
        placed[alone[0]] = region._replace(offset=0, copies=moved)
        device_end = region.carried
    return placed, whole_lines(end), device_end  # torch.save wants storages that are some whole elements


def _arrange_region(
    slots: dict[int, Slot], end: int, device_end: int, device_link: bool, all_packed: bool
) -> PlacedRegion:
    nbytes = max(slot.start + elements_in(slot.shape, slot.stride) * slot.dtype.itemsize for slot in slots.values())
    first = next(iter(slots.values()))
    phase = (first.phase - first.start) % LINE
    if len(slots) == 1:
        phase -= phase % first.dtype.itemsize  # memory of other libraries need not be aligned to its elements
    distinct = {slot[:2] + slot[4:]: leaf for leaf, slot in reversed(slots.items())}.values()
    # An expanded dimension is copied once, see `memory_layout.once`.
    shapes = {
        leaf: tuple(size if step else min(size, 1) for size, step in zip(slot.shape, slot.stride, strict=True))
        for leaf, slot in ((leaf, slots[leaf]) for leaf in distinct)
    }
    spread = nbytes > sum(math.prod(shape) * slots[leaf].dtype.itemsize for leaf, shape in shapes.items())
    dense: list[Copy] = []
    carried = 0 if spread else nbytes
    for leaf, shape in shapes.items() if spread else ():
        carried = whole_lines(carried)
        dense.append(Copy(leaf, slots[leaf].dtype, shape, torch.empty(shape, device="meta").stride(), carried))
        carried += math.prod(shape) * slots[leaf].dtype.itemsize
    on_link = device_link and first.device != "cpu" and carried > 0
    direct = not all_packed and not on_link and carried >= DIRECT_BYTES
    end = device_end if on_link else end
    offset = 0 if direct else end if spread else end + phase
    copies = (
        [copy._replace(offset=offset + copy.offset) for copy in dense]
        if spread
        else [
            Copy(leaf, slots[leaf].dtype, shape, slots[leaf].stride, offset + slots[leaf].start)
            for leaf, shape in shapes.items()
        ]
    )
    return PlacedRegion(slots, nbytes, phase, spread, direct, on_link, offset, carried, copies)


def whole_lines(size: int) -> int:
    """Round so many bytes up to the end of a cache line."""
    return -(-size // LINE) * LINE
