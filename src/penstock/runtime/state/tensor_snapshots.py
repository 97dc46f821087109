"""Tensors as they were: buffers, and tensors in attributes, whose contents a step may change in any way there is.

A change cannot be seen coming, and not for certain afterwards: batch norm and `.data` write past a tensor's version.
So all contents are copied, again before each step, into memory that is kept for it. That reads each once, where a step
reads it for each microbatch. Where a tensor lies is noted as well, so that `set_`, `resize_` and an assignment to
`.data` can be taken back.

A tensor above `LARGE_BYTES` that a whole step has left alone is most likely a table that never changes (a mask, frozen
weights): its copy is let go of, and only its version is watched. If a later step does write to it, it is `lost`, and
whoever puts things back has to report so.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.model.original.placeholders import is_away
from penstock.runtime.state.memory_layout import elements_in
from penstock.runtime.state.ownership import version_of

LARGE_BYTES = 16 * 2**20


class Contents:
    """The contents of any tensors."""

    def __init__(self) -> None:
        self.kept: dict[int, _Kept] = {}
        self.lost: list[Tensor] = []  # changed, and without a copy

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Remember what is in them now, and in no others."""
        known, self.kept = self.kept, {}
        to: list[Tensor] = []
        of: list[Tensor] = []
        with torch.no_grad():
            for tensor in tensors:
                if id(tensor) in self.kept or tensor.is_meta or is_away(tensor):
                    continue
                kept = known.get(id(tensor))
                if kept is None or not kept.is_of(tensor):
                    kept = _Kept(tensor)
                self.kept[id(tensor)] = kept
                if kept.still and kept.version == version_of(tensor):
                    continue
                if kept.copy is None or kept.memory is None:
                    kept.copy = kept.cloned()
                else:
                    to.append(kept.copy)
                    of.append(kept.memory)
                kept.version = version_of(tensor)
            if to:
                torch._foreach_copy_(to, of)

    def put_back(self) -> None:
        """Make all of them what they were."""
        self.lost = []
        with torch.no_grad():
            for kept in self.kept.values():
                if not kept.put_back():
                    self.lost.append(kept.tensor)

    def left_alone(self) -> None:
        """A step has ended well: the copies of large tensors that it has not changed are let go of."""
        with torch.no_grad():
            for kept in self.kept.values():
                if kept.large and kept.copy is not None and kept.has_the_same():
                    kept.copy, kept.still = None, True


class _Kept:
    """One tensor; `memory` is the part of its storage that it covers, where that can be said."""

    __slots__ = ("alias", "copy", "large", "memory", "place", "still", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = version_of(tensor)
        plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
        self.alias = tensor.detach() if plain else None  # stays where it is, whatever becomes of the tensor
        self.place = _place(tensor) if plain else None
        self.memory = None if self.alias is None else _covered(self.alias)
        self.large = self.memory is not None and self.memory.numel() * self.memory.element_size() > LARGE_BYTES
        self.copy: Tensor | None = None
        self.still = False  # a step has left it alone

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is that tensor, in the same memory."""
        return self.tensor is tensor and self.place is not None and self.place == _place(tensor)

    def cloned(self) -> Tensor:
        return (self.tensor.detach() if self.memory is None else self.memory).clone()

    def has_the_same(self) -> bool:
        """Whether the contents are the same bits."""
        if self.place != _place(self.tensor) or self.version != version_of(self.tensor):
            return False
        return self.copy is not None and self.memory is not None and _surely_same_bits(self.memory, self.copy)

    def put_back(self) -> bool:
        """False where it has changed, and nobody knows what it was."""
        if self.place is not None and self.place != _place(self.tensor):
            assert self.alias is not None
            self.tensor.data = self.alias
        if self.copy is None:
            return self.version == version_of(self.tensor)
        with torch.inference_mode(self.tensor.is_inference()):
            if self.memory is None:
                self.tensor.copy_(self.copy)
            elif not _surely_same_bits(self.memory, self.copy):
                self.memory.copy_(self.copy)
        return True


def _place(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _covered(tensor: Tensor) -> Tensor:
    """In one row where there are no gaps, or one element is in several places (as of a row that is expanded)."""
    extent = elements_in(tensor.shape, tensor.stride())
    return tensor if extent > tensor.numel() else tensor.as_strided((extent,), (1,))


def _surely_same_bits(one: Tensor, other: Tensor) -> bool:
    """Like `memory.same_bits`, but False where it would take a copy to find out."""
    if not one.is_contiguous() or one.is_conj() or one.is_neg():
        return False
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
