"""Whether ranks were given the same batch, told by a few numbers.

A rank uses only what its stages need: the first stage's the inputs, the last stage's the target. Ranks that load rows
of their own, by their number in the world, would so train inputs against the targets of other rows, and nothing fails.
So in a pipeline's first step on processes every rank says what it was given: a checksum of shapes and whole numbers,
and some of the fractions, which may differ by what devices round differently (a teacher's output, for one).
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Fingerprint", "Seen", "alike", "fingerprint", "sample"]

SAMPLE = 64  # numbers of a tensor
ROUNDING = 0.02  # of the largest of them; bfloat16 has steps of 0.008


class Fingerprint(NamedTuple):
    """Of all plain tensors in a value."""

    checksum: int
    samples: tuple[tuple[float, ...], ...]

    def fits(self, other: Fingerprint | None) -> bool:
        """Whether both may be of the same value."""
        if other is None or self.checksum != other.checksum:
            return False
        pairs = zip(self.samples, other.samples, strict=True)
        return all(alike(mine, theirs, ROUNDING) for mine, theirs in pairs)


Seen = tuple[Fingerprint | None, Fingerprint | None]  # of the inputs and of the target


def alike(one: tuple[float, ...] | list[float], other: tuple[float, ...] | list[float], rounding: float) -> bool:
    """Whether samples are the same, up to a share of the largest number."""
    slack = rounding * max((abs(value) for value in one if math.isfinite(value)), default=0.0)
    return all(a == b or (a != a and b != b) or abs(a - b) <= slack for a, b in zip(one, other, strict=True))


def sample(values: Tensor, count: int) -> list[float]:
    """Some numbers of a tensor, evenly spread."""
    values = torch.view_as_real(values) if values.is_complex() else values
    flat = values.permute(sorted(range(values.dim()), key=values.stride, reverse=True)).reshape(-1)  # without a copy
    return [float(value) for value in flat[:: max(1, flat.numel() // count)][:count].tolist()]


def fingerprint(value: Any) -> Fingerprint | None:
    """None where there is no plain tensor in it."""
    checksum, samples, found = 0, [], False
    for leaf in _plain(value):
        found = True
        checksum = zlib.crc32(f"{leaf.dtype} {tuple(leaf.shape)}".encode(), checksum)
        if leaf.is_floating_point() or leaf.is_complex():
            samples.append(tuple(sample(leaf.contiguous(), SAMPLE)))
        elif leaf.numel():
            whole = leaf.cpu().contiguous()
            octets = (ctypes.c_char * (whole.numel() * whole.element_size())).from_address(whole.data_ptr())
            checksum = zlib.crc32(octets, checksum)
    return Fingerprint(checksum, tuple(samples)) if found else None


def _plain(value: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(value):
        if type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_quantized and not leaf.is_meta:
            yield leaf.detach().resolve_conj().resolve_neg()
