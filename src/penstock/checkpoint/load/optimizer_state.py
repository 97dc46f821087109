"""What an optimizer of torch keeps for a parameter, and whether a checkpoint has that.

Optimizers take any state that they are given, and fail in the middle of their next step where it is another. What is
due depends on their class and options, so one of the same kind takes a step with a small parameter, to see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.messages.plain import TENSOR

SMALL = (3, 5)  # the shape of that parameter; what has another shape is no value for each of its entries


def state_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return what such an optimizer keeps for a small parameter; nothing where that cannot be seen."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return {}
    small = nn.Parameter(torch.zeros(SMALL, dtype=parameter.dtype, device=parameter.device))
    small.grad = torch.zeros_like(small)
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    try:
        kind: Any = type(optimizer)
        made = kind([{**options, "params": [small]}])
        made.step()
    except (RuntimeError, TypeError, ValueError):  # It wants sparse gradients, say, or a closure.
        return {}
    return dict(made.state[small])


def state_faults(
    name: str, entries: Any, due: Mapping[str, Any], shape: tuple[int, ...], tensors: Mapping[str, Any]
) -> Iterator[str]:
    """Describe what the saved state of a parameter of this shape lacks; one that was never updated has none."""
    for key, value in due.items() if entries else ():
        entry = entries.get(key) if isinstance(entries, dict) else None
        saved = tensors.get(str(entry.get(TENSOR))) if isinstance(entry, dict) else None
        if value is None or (isinstance(value, Tensor) and saved is not None and _fits(saved, value, shape)):
            continue
        if not isinstance(value, Tensor) and isinstance(entry, type(value)):
            continue
        yield f"the optimizer's {key} of {name} is not of the kind that the optimizer keeps"


def _fits(saved: Mapping[str, Any], value: Tensor, shape: tuple[int, ...]) -> bool:
    floating: bool = getattr(torch, saved["dtype"]).is_floating_point == value.is_floating_point()
    if value.dim() == 0:
        return floating and math.prod(saved["shape"]) == 1
    return floating and (value.shape != SMALL or tuple(saved["shape"]) == shape)
