"""Whether ranks were given the same batch, told by a number.

A rank uses only what its stages need: the first stage's the inputs, the last stage's the target. Ranks that load rows
of their own, by their number in the world, would so train inputs against the targets of other rows, and nothing fails.
So in a pipeline's first step on processes every rank says what it was given, in two numbers.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["fingerprint"]


def fingerprint(value: Any) -> int | None:
    """A checksum of all plain tensors in it; None where there is none."""
    found: int | None = None
    for leaf in pytree.tree_leaves(value):
        if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_meta:
            continue
        flat = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        found = zlib.crc32(f"{leaf.dtype} {tuple(leaf.shape)}".encode(), found or 0)
        if flat.numel():
            found = zlib.crc32((ctypes.c_char * flat.numel()).from_address(flat.data_ptr()), found)
    return found
