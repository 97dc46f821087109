"""What a message looks like, apart from its numbers.

Both ends of a channel keep the layout of each message of a step: the containers, the shape,
dtype and `requires_grad` of every tensor, and the plain values. While a message looks as it
did in the step before, only its bytes travel, in one frame::

    | header, 64 bytes | tensor | pad to 64 | tensor | ...        packed tensors
    then, in messages of their own, from and into their final memory:   direct tensors

Small tensors are packed, because a message costs more than a copy of them; from `DIRECT_BYTES`
on the copy costs more (measured: penstock bench transport). The layout alone decides which, so that
both ends agree. A new layout travels pickled: the ranks of one process group trust each other,
as they do in torch's own object collectives.
"""

from __future__ import annotations

import ctypes
import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from penstock.errors import UsageError

__all__ = ["ALIGNMENT", "DIRECT_BYTES", "HEADER_BYTES", "Book", "Frame", "Layout", "Leaves", "flatten"]

HEADER_BYTES = 64
ALIGNMENT = 64
DIRECT_BYTES = 1024 * 1024
BOOK_LIMIT = 1024
SPARE_FRAMES = 4  # kept for reuse, of each layout

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


class Slot(NamedTuple):
    """One tensor of a layout."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    device: str  # the type: each end knows its own index
    stride: tuple[int, ...]
    nbytes: int
    offset: int  # in elements from the start of the frame, or -1: direct


class Frame:
    """A packing buffer with its views, made once and reused whenever its last send is done."""

    __slots__ = ("header", "tensor", "views")

    def __init__(self, nbytes: int, slots: Sequence[Slot | None], memory: Tensor | None = None) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8) if memory is None else memory
        self.header = (ctypes.c_char * HEADER_BYTES).from_address(self.tensor.data_ptr())
        self.views = [view(self.tensor, slot) for slot in slots if slot is not None and slot.offset >= 0]


def view(frame: Tensor, slot: Slot) -> Tensor:
    """A tensor in the memory of a frame. `set_` makes it no view in the eyes of autograd."""
    blank = torch.empty(0, dtype=slot.dtype)
    return blank.set_(frame.untyped_storage(), slot.offset, slot.shape, slot.stride)


class Layout:
    """All that both ends must know to move a value as bare bytes."""

    def __init__(
        self, form: type | None, spec: Any, slots: Sequence[Slot | None], plain: bytes, text: bytes | None = None
    ) -> None:
        self.form = form
        self.spec = spec
        self.slots = tuple(slots)  # None: the leaf is a plain value
        self.plain = plain
        # the sender's text on both ends: equal values need not pickle to equal bytes
        self.text = pickle.dumps((form, _take_down(spec), self.slots, plain)) if text is None else text
        self.checksum = zlib.crc32(self.text)
        tensors = [slot for slot in self.slots if slot is not None]
        packed = [slot for slot in tensors if slot.offset >= 0]
        # Whether the value can be made before its bytes have come: not if it must then be copied to a device.
        self.stays = all(slot.device == "cpu" or slot.offset < 0 for slot in tensors)
        self.directs = [slot for slot in tensors if slot.offset < 0]
        self.frame_bytes = _end(packed)
        self.payload_bytes = sum(slot.nbytes for slot in tensors)
        # for the quick way: one small tensor, bare or as the only entry of a flat list (as gradients are)
        self.lone = packed[0] if form is not None and len(self.slots) == len(packed) == 1 and self.stays else None
        self._spare: list[Frame] = []

    @classmethod
    def of(cls, leaves: Leaves, device_link: bool) -> Layout:
        """The layout of this value. With `device_link`, tensors off the CPU travel on a link of their own."""
        slots: list[Slot | None] = []
        start = HEADER_BYTES
        for leaf in leaves.items:
            if not isinstance(leaf, Tensor):
                slots.append(None)
                continue
            _check_sendable(leaf)
            nbytes = leaf.numel() * leaf.element_size()
            direct = nbytes >= DIRECT_BYTES or (device_link and not leaf.is_cpu and nbytes > 0)
            offset = -1 if direct else start // leaf.element_size()
            stride = torch.empty(leaf.shape, device="meta").stride()
            slots.append(Slot(leaf.shape, leaf.dtype, leaf.requires_grad, leaf.device.type, stride, nbytes, offset))
            if not direct:
                start = _align(start + nbytes)
        return cls(leaves.form, leaves.spec, slots, _dump_plain(leaves.items, slots))

    @classmethod
    def load(cls, text: bytes) -> Layout:
        """From the text that a peer of this group sent."""
        form, spec, slots, plain = pickle.loads(text)
        return cls(form, _put_up(spec), slots, plain, text)

    def fits(self, value: Any) -> Sequence[Any] | None:
        """The leaves of the value if it looks like this, so that only its bytes need to travel; else None."""
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
        for leaf, slot in zip(items, self.slots, strict=True):
            if slot is not None:
                if not _fills(leaf, slot):
                    return None
            elif isinstance(leaf, Tensor) if form is None else leaf is not None:
                return None
        if form is not None:
            return items  # its only plain values are None
        return items if spec == self.spec and _dump_plain(items, self.slots) == self.plain else None

    def take_frame(self) -> Frame:
        """A packing buffer that no send is using."""
        return self._spare.pop() if self._spare else Frame(self.frame_bytes, self.slots)

    def give_back(self, frame: Frame) -> None:
        """The send of this frame is done."""
        if len(self._spare) < SPARE_FRAMES:
            self._spare.append(frame)

    def pack(self, leaves: Sequence[Any], frame: Frame) -> Sequence[Tensor]:
        """Copy what is packed into the frame; returns the tensors that travel by themselves."""
        if self.lone is not None:
            leaf = leaves[0]
            frame.views[0].copy_(leaf.detach() if leaf.requires_grad else leaf)
            return ()
        directs = []
        views = iter(frame.views)
        for leaf, slot in zip(leaves, self.slots, strict=True):
            if slot is None:
                continue
            plain = leaf.detach()
            if slot.offset >= 0:
                next(views).copy_(plain)
            else:
                directs.append(plain.resolve_conj().resolve_neg().contiguous())
        return directs

    def build(self, frame: Tensor, directs: Sequence[Tensor], device: torch.device | None) -> Any:
        """The value whose bytes are, or will be, in the frame and in the direct tensors."""
        if self.lone is not None:
            tensor = view(frame, self.lone)
            if self.lone.requires_grad:
                tensor.requires_grad_()
            return tensor if self.form is Tensor else [tensor] if self.form is list else (tensor,)
        items: list[Any] = []
        arrived = iter(directs)
        plain = iter(pickle.loads(self.plain)) if self.plain else None
        for slot in self.slots:
            if slot is None:
                items.append(None if plain is None else next(plain))
                continue
            tensor = next(arrived) if slot.offset < 0 else view(frame, slot)
            if device is not None and slot.device != "cpu" and tensor.is_cpu:
                tensor = tensor.to(device)
            items.append(tensor.requires_grad_() if slot.requires_grad else tensor)
        if self.form is Tensor:
            return items[0]
        if self.form is not None:
            return tuple(items) if self.form is tuple else items
        return pytree.tree_unflatten(items, self.spec)

    def all_packed(self) -> Layout:
        """The same value with nothing direct: how the first message of a new layout travels, in one piece."""
        if not self.directs:
            return self
        slots: list[Slot | None] = []
        start = HEADER_BYTES
        for slot in self.slots:
            if slot is None:
                slots.append(None)
                continue
            slots.append(slot._replace(offset=start // slot.dtype.itemsize))
            start = _align(start + slot.nbytes)
        return Layout(self.form, self.spec, slots, self.plain, self.text)


def _fills(leaf: Any, slot: Slot) -> bool:
    kind = type(leaf)
    return (
        (kind is Tensor or kind is Parameter)
        and leaf.shape == slot.shape
        and leaf.dtype is slot.dtype
        and leaf.requires_grad is slot.requires_grad
        and leaf.is_cpu is (slot.device == "cpu")
        and leaf.layout is torch.strided
    )


class Book:
    """One object for equal layouts, so that they share their packing buffers."""

    def __init__(self) -> None:
        self._layouts: dict[bytes, Layout] = {}

    def intern(self, text: bytes, make: Callable[[], Layout]) -> Layout:
        """The layout of this text; a book that has grown large (shapes never repeat) begins anew."""
        if len(self._layouts) > BOOK_LIMIT:
            self._layouts.clear()
        layout = self._layouts.get(text)
        if layout is None:
            layout = self._layouts[text] = make()
        return layout

    def clear(self) -> None:
        self._layouts.clear()


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


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _end(packed: Sequence[Slot]) -> int:
    """Where the last packed tensor ends; a frame is never smaller than its header."""
    ends = [slot.offset * slot.dtype.itemsize + slot.nbytes for slot in packed]
    return max([HEADER_BYTES, *ends])


def _dump_plain(items: Sequence[Any], slots: Sequence[Slot | None]) -> bytes:
    """The plain values as bytes, which compare as Python's `==` does not (1, 1.0 and True; nan)."""
    plain = [item for item, slot in zip(items, slots, strict=True) if slot is None]
    if all(item is None for item in plain):
        return b""
    try:
        return pickle.dumps(plain)
    except Exception as error:
        kinds = ", ".join(sorted({type(item).__name__ for item in plain}))
        raise UsageError(
            f"a value cannot cross to another process: {error} (among values of type {kinds}); "
            "send tensors, None and plain picklable values"
        ) from error


def _check_sendable(leaf: Tensor) -> None:
    plain = type(leaf) is Tensor or type(leaf) is Parameter
    if not plain and hasattr(leaf, "__tensor_flatten__"):
        kind = type(leaf).__name__
    elif leaf.is_meta:
        kind = "meta"
    elif plain and leaf.is_quantized:
        kind = "quantised"
    elif plain and (leaf.layout is not torch.strided or leaf.is_nested):
        kind = "nested" if leaf.is_nested else str(leaf.layout)
    else:
        return
    raise UsageError(f"a {kind} tensor cannot cross to another process; send a dense one (a DTensor's .to_local())")
