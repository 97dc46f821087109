"""What a message looks like, apart from its numbers.

Both ends of a channel keep the layout of each message of a step: the containers, how every tensor lies in memory and
whether it wants a gradient (`tensor_places`), and the plain values. While a message looks as it did in the step
before, only its bytes travel, in one frame::

    | header, 64 bytes | region | pad | region | ...        packed, each at its place in a cache line
    before it, in messages of their own, from and into their final memory:   direct regions

Small regions are packed, because a message costs more than a copy of them; large ones are not, because their copy
costs more (measured: penstock bench transport). The layout alone decides which, so that both ends agree.
"""

from __future__ import annotations

import ctypes
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from penstock.errors import UsageError
from penstock.runtime.state.memory_layout import LINE, more_than_numbers, once
from penstock.runtime.transport.layout import encoding
from penstock.runtime.transport.layout.encoding import Content
from penstock.runtime.transport.layout.tensor_places import HEADER_BYTES, Copy, Slot, arrange, slots_of, view

SPARE_FRAMES = 8  # kept for reuse, of each layout
_FLAT = {Tensor, type(None)}


class Leaves(NamedTuple):
    """A value taken apart. `form` is `Tensor`, `tuple` or `list` for the quick ways; else `None`, with a spec."""

    form: type | None
    items: Sequence[Any]
    spec: Any


def flatten(value: Any) -> Leaves:
    """Take a value apart; a tensor and a flat tuple or list of tensors and `None` skip the pytree machinery."""
    form = type(value)
    if form is Tensor:
        return Leaves(Tensor, (value,), None)
    if (form is tuple or form is list) and _FLAT.issuperset(map(type, value)):
        return Leaves(form, value, None)
    items, spec = pytree.tree_flatten(value)
    return Leaves(None, items, spec)


class Frame:
    """A packing buffer with its views, made once and reused whenever its last send is done."""

    __slots__ = ("header", "tensor", "views")

    def __init__(self, nbytes: int, copies: Sequence[Copy], memory: Tensor | None = None) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu") if memory is None else memory
        self.header = (ctypes.c_char * HEADER_BYTES).from_address(self.tensor.data_ptr())
        self.views = [view(self.tensor, copy) for copy in copies]


class Layout:
    """All that both ends must know to move a value as bare bytes."""

    def __init__(self, content: Content, text: bytes | None = None, *, all_packed: bool = False) -> None:
        self.content = content
        self.form: Any  # what the value is where it is simple: `Tensor`, `tuple` or `list`
        self.form, self.spec, self.slots, self.plain, _ = content
        # Both ends have the sender's text: equal values need not pickle to equal bytes.
        self.text = encoding.dump(content) if text is None else text
        self.checksum = zlib.crc32(self.text)
        self.regions, self.frame_bytes, self.device_bytes = arrange(self.slots, content.device_link, all_packed)
        self.directs = [region for region in self.regions if region.direct]
        self.on_link = [region for region in self.regions if region.on_link]
        in_frame = [region for region in self.regions if not (region.direct or region.on_link)]
        self.copies = [copy for region in in_frame for copy in region.copies]
        self.payload_bytes = sum(region.carried for region in self.regions)
        self.on_cpu = all(slot is None or slot.device == "cpu" for slot in self.slots)
        # Whether the value can be built before its bytes have come: they need not be copied then.
        self.in_place = self.on_cpu and not any(region.spread for region in self.regions)
        self.lone = self._lone()
        self._sizes = [region.nbytes for region in self.regions]
        self._tensors = [slot for slot in self.slots if slot is not None]
        self._sharing = [leaf for region in self.regions if len(region.slots) > 1 for leaf in region.slots]
        self._wanting = [leaf for leaf, slot in enumerate(self.slots) if slot is not None and slot.requires_grad]
        self._unsettled = [region for region in self.regions if not region.settled]
        self._settled = [
            (leaf, slot, region.offset // slot.dtype.itemsize)
            for region in self.regions
            if region.settled
            for leaf, slot in region.slots.items()
        ]
        self.spare: deque[Frame] = deque(maxlen=SPARE_FRAMES)  # frames whose last send is done

    def _lone(self) -> Slot | None:
        """Return the one small tensor, bare or in a flat list (as gradients are), for which there is a quick way."""
        slot = self.slots[0] if self.form is not None and len(self.slots) == 1 else None
        if slot is None or not self.in_place or self.directs or 0 in slot.stride or not self.payload_bytes:
            return None
        return slot

    @classmethod
    def of(cls, leaves: Leaves, device_link: bool) -> Layout:
        """Make the layout of this value. With `device_link`, tensors off the CPU travel on a link of their own."""
        tensors = [leaf for leaf in leaves.items if isinstance(leaf, Tensor)]
        for tensor in tensors:
            _check_sendable(tensor)
        found = iter(slots_of(tensors))
        slots = tuple(next(found) if isinstance(leaf, Tensor) else None for leaf in leaves.items)
        return cls(Content(leaves.form, leaves.spec, slots, _dump_plain(leaves.items, slots), device_link))

    @classmethod
    def load(cls, text: bytes, is_known: bool) -> Layout:
        """Read the text that a peer sent; `is_known`: it has shown that it is of this run, or of this user."""
        return cls(encoding.load(text, is_known), text)

    def all_packed(self) -> Layout:
        """Lay the same value out in one piece, with nothing direct, as the first message of a new layout travels."""
        return Layout(self.content, self.text, all_packed=True) if self.directs else self

    # -- with the sender

    def fits(self, value: Any) -> Sequence[Any] | None:
        """Return the leaves of the value if it looks like this, so that only its bytes need to travel; else None."""
        form, kind, spec = self.form, type(value), None
        if form is Tensor:
            items: Sequence[Any] = (value,)
        elif form is not None:
            if kind is not form:
                return None
            items = value
        else:
            items, spec = pytree.tree_flatten(value)
        if len(items) != len(self.slots):
            return None
        addresses = []
        for leaf, slot in zip(items, self.slots, strict=True):
            if slot is None:
                if isinstance(leaf, Tensor) if form is None else leaf is not None:
                    return None
                continue
            if not _fills(leaf, slot):
                return None
            address = leaf.data_ptr()
            if address % LINE != slot.phase:
                return None
            addresses.append(address)
        if len(addresses) > 1 and not self._overlap_alike(addresses, items):
            return None
        if form is not None:
            return items  # Its only plain values are None.
        return items if spec == self.spec and _dump_plain(items, self.slots) == self.plain else None

    def _overlap_alike(self, addresses: Sequence[int], items: Sequence[Any]) -> bool:
        """Return whether those tensors overlap that do so here, in the same way, and no others."""
        if len(self.regions) < len(addresses):
            starts: dict[int, int] = {}
            for address, slot in zip(addresses, self._tensors, strict=True):
                if starts.setdefault(slot.region, address - slot.start) != address - slot.start:
                    return False
            if any(items[leaf].is_conj() or items[leaf].is_neg() for leaf in self._sharing):
                return False
            addresses = list(starts.values())
        end = 0
        for start, nbytes in sorted(zip(addresses, self._sizes, strict=True)):
            if nbytes:
                if start < end:
                    return False
                end = start + nbytes
        return True

    def packed(self, leaves: Sequence[Any]) -> tuple[Frame, list[tuple[Tensor, Tensor | None]]]:
        """Return a packing buffer that no send is using, with what is packed in it, and what travels by itself."""
        frame = self.spare.pop() if self.spare else Frame(self.frame_bytes, self.copies)
        return frame, self.pack(leaves, frame)

    def pack(self, leaves: Sequence[Any], frame: Frame) -> list[tuple[Tensor, Tensor | None]]:
        """Copy what is packed into the frame; returns the bytes that travel by themselves, see `PlacedRegion.take`."""
        if self.lone is not None:
            leaf = leaves[0]
            frame.views[0].copy_(leaf.detach() if leaf.requires_grad else leaf)
            return []
        for copy, place in zip(self.copies, frame.views, strict=True):
            place.copy_(once(leaves[copy.leaf].detach()))
        return [region.take(leaves) for region in self.directs]

    def pack_on_device(self, leaves: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
        """Return what travels by the device's link, and the tensor in whose memory that still is, if in one's."""
        if len(self.on_link) == 1:
            return self.on_link[0].take(leaves)
        home = leaves[next(iter(self.on_link[0].slots))].device
        payload = torch.empty(self.device_bytes, dtype=torch.uint8, device=home)
        for region in self.on_link:
            for copy in region.copies:
                view(payload, copy).copy_(once(leaves[copy.leaf].detach()))
        return payload, None

    # -- with the receiver

    def blank_on_device(self, device: torch.device) -> Tensor:
        """Allocate memory for what travels by the device's link."""
        if len(self.on_link) == 1:
            return self.on_link[0].make_carrier(device)
        return torch.empty(self.device_bytes, dtype=torch.uint8, device=device)

    def build(
        self, frame: Tensor, directs: Sequence[Tensor], device: torch.device | None, payload: Tensor | None = None
    ) -> Any:
        """Make the value whose bytes are, or will be, in the frame, in messages of their own and in the payload."""
        lone = self.lone
        if lone is not None:
            blank = torch.empty(0, dtype=lone.dtype, device="cpu")
            offset = self.regions[0].offset // lone.dtype.itemsize
            blank.set_(frame.untyped_storage(), offset, lone.shape, lone.stride).requires_grad_(lone.requires_grad)
            return blank if self.form is Tensor else self.form((blank,))
        items: list[Any] = [None] * len(self.slots)
        for leaf, slot, offset in self._settled:
            blank = torch.empty(0, dtype=slot.dtype, device="cpu")
            items[leaf] = blank.set_(frame.untyped_storage(), offset, slot.shape, slot.stride)
        arrived = iter(directs)
        for region in self._unsettled:
            carrier = next(arrived) if region.direct else payload if region.on_link else frame
            assert carrier is not None, "what is on the device comes by its link"
            for leaf, tensor in region.settle(carrier, device).items():
                items[leaf] = tensor
        for leaf in self._wanting:
            items[leaf].requires_grad_()
        if self.plain:
            plain = iter(encoding.load_plain(self.plain))
            items = [next(plain) if slot is None else item for item, slot in zip(items, self.slots, strict=True)]
        if self.form is Tensor:
            return items[0]
        if self.form is not None:
            return tuple(items) if self.form is tuple else items
        return pytree.tree_unflatten(items, self.spec)


def _fills(leaf: Any, slot: Slot) -> bool:
    kind = type(leaf)
    return (
        (kind is Tensor or kind is Parameter)
        and leaf.shape == slot.shape
        and leaf.dtype is slot.dtype
        and leaf.requires_grad is slot.requires_grad
        and leaf.is_cpu is (slot.device == "cpu")
        and leaf.layout is torch.strided
        and leaf.stride() == slot.stride
    )


# One object for equal layouts, by their text, so that they share packing buffers; it lives while an end predicts by it.
Book = WeakValueDictionary[bytes, Layout]


def _dump_plain(items: Sequence[Any], slots: Sequence[Slot | None]) -> bytes:
    return encoding.dump_plain([item for item, slot in zip(items, slots, strict=True) if slot is None])


def _check_sendable(leaf: Tensor) -> None:
    kind = more_than_numbers(leaf)
    if kind is None:
        if leaf.is_meta:
            kind = "meta tensor"
        elif leaf.is_quantized:
            kind = "quantised tensor"
        elif leaf.layout is not torch.strided:
            kind = f"{leaf.layout} tensor"
        else:
            return
    raise UsageError(f"a {kind} cannot cross to another process; send a dense one (a DTensor's .to_local())")
