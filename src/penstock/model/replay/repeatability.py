"""A second run on the same example: what the code between units gives them must not change from run to run.

Every stage runs that code for itself. One that reads a clock, a counter of the process or random numbers that are not
torch's would compute with one value on one stage and with another on the next, where the model computes with one. A
unit may do so, because it runs in one place; what comes after one that did says nothing any more.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.model.replay.recording.nested_values import flatten, tensors_in
from penstock.model.replay.recording.unit_calls import ForwardRecording

PLAIN = (bool, int, float, complex, str, bytes, type(None))


def checksum(value: Any) -> int:
    """A checksum of all numbers in a value."""
    plain = [leaf for leaf in flatten(value)[0] if isinstance(leaf, PLAIN)]
    found = zlib.crc32(repr(plain).encode())
    for tensor in tensors_in(value):
        found = zlib.crc32(str((tensor.dtype, tuple(tensor.shape))).encode(), found)
        if _has_numbers(tensor):
            dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            size = dense.numel() * dense.element_size()
            found = zlib.crc32((ctypes.c_char * size).from_address(dense.data_ptr()), found) if size else found
    return found


def _has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor's numbers lie in memory: not on the meta device, not inside of a function transform."""
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)


def check_repeatable(record: Callable[[], ForwardRecording], first: ForwardRecording | None = None) -> ForwardRecording:
    """What `record` gives, or has given `first`, if it gives it once more."""
    first = first or record()
    second = record()
    for one, two in zip_longest(first.values, second.values):
        if one is None or two is None or one[:2] != two[:2]:
            unit = (one or two)[0]
            raise ModelError(
                f"in a second run on the same example, the model's code between its units "
                f"{f'gave {unit} other values' if unit else 'returned other values'}: it reads something that changes "
                f"from call to call, such as a clock, a counter, or random numbers that are not torch's, which every "
                f"stage would read anew; draw with torch (torch.rand), or pass it to the model as an input"
            )
        if one != two:
            break
    return first
