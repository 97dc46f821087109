"""What a module's attributes were, as values that can be compared with what they are later."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.model.names import dotted_name
from penstock.model.original.settings import OWN

PLAIN = (int, float, str, bytes, torch.Size, torch.dtype, torch.device)
CONTAINERS = (list, tuple, dict, set, deque)
_OPAQUE = (nn.Module, Tensor, type, *PLAIN)
_DEPTH = 3  # of containers in containers


def changes_in_place(value: Any) -> bool:
    """Whether code that is handed the value can change it for others: containers, generators, objects with fields."""
    return isinstance(value, (*CONTAINERS, torch.Generator)) or has_fields(value) or _draws(value)


def has_fields(value: Any) -> bool:
    """Whether a value is an object of the user's, such as a configuration."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, (*_OPAQUE, *CONTAINERS))


def _draws(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return isinstance(value, random.Random) or (numpy is not None and isinstance(value, numpy.random.Generator))


def frozen(value: Any, depth: int = _DEPTH) -> Any:
    """All that is in a value, for `==`; tensors and what cannot be looked into by identity."""
    if isinstance(value, PLAIN) or value is None:
        return type(value), value
    if isinstance(value, Tensor):
        return id(value), -1 if value.is_inference() else value._version
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if _draws(value):
        return repr(value.bit_generator.state)
    if not depth or not changes_in_place(value):
        return id(value)
    if isinstance(value, dict):
        return tuple((frozen(key, 0), frozen(each, depth - 1)) for key, each in value.items())
    if isinstance(value, set):
        return frozenset(frozen(each, 0) for each in value)
    if isinstance(value, CONTAINERS):
        return tuple(frozen(each, depth - 1) for each in value)
    return tuple((name, frozen(each, depth - 1)) for name, each in vars(value).items())


def own_state(unit: nn.Module) -> dict[str, Any]:
    """What a unit could change on itself: copies of its buffers and of its attributes, with what is in them."""
    found: dict[str, Any] = {}
    for name, holder in unit.named_modules():
        own = {key: value for key, value in vars(holder).items() if key not in OWN}
        for key, value in {**own, **holder._buffers}.items():
            if isinstance(value, Tensor):
                found[dotted_name(name, key)] = value.detach().clone()
            elif isinstance(value, PLAIN) or changes_in_place(value):
                found[dotted_name(name, key)] = frozen(value)
    return found


def changed_by(unit: nn.Module, before: dict[str, Any]) -> Iterator[str]:
    """The names of what a call has changed on a unit."""
    for name, value in own_state(unit).items():
        old = before.get(name)
        if isinstance(value, Tensor) and isinstance(old, Tensor):
            same = _equal(old, value)
        else:
            same = type(old) is type(value) and old == value
        if not same:
            yield name


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same numbers; what is not a number on both sides counts as the same."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def updates_itself(unit: nn.Module) -> Iterator[str]:
    """The names of what a unit that cannot be run would change: running statistics are known by their kind."""
    for name, module in unit.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats and module.training:
            yield dotted_name(name, "running_mean")
