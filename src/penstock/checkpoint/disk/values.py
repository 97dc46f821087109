"""The state of schedulers, scalers, data and random generators, in a checkpoint: see `plain`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from penstock.errors import CheckpointError
from penstock.messages import plain
from penstock.messages.plain import TENSOR, encode, same

__all__ = ["TENSOR", "decode", "encode", "same"]


def decode(document: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The value that `encode` was given; `tensor` finds what was set aside."""
    try:
        return plain.decode(document, tensor)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"the checkpoint has a value that cannot be read: {error}") from error
