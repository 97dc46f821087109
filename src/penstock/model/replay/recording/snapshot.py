"""What a module's attributes were, for a comparison with what they are later; and who reads and writes them.

Python has no hook for the latter on an instance, so for the time of a run each module is of a class derived from its
own that tells of every access. Compiled and scripted modules are left as they are: their code is not Python's, or would
be compiled once more.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.model.names import dotted_name
from penstock.model.original.settings import OWN

PLAIN = (int, float, str, bytes, torch.Size, torch.dtype, torch.device)
CONTAINERS = (list, tuple, dict, set, deque)
_OPAQUE = (nn.Module, Tensor, type, *PLAIN)
_DEPTH = 3  # Levels of containers in containers.


def changes_in_place(value: Any) -> bool:
    """Return whether code that is handed the value can change it for others: containers, generators, objects."""
    return isinstance(value, (*CONTAINERS, torch.Generator)) or has_fields(value) or _draws(value)


def has_fields(value: Any) -> bool:
    """Return whether a value is an object of the user's, such as a configuration."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, (*_OPAQUE, *CONTAINERS))


def _draws(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return isinstance(value, random.Random) or (numpy is not None and isinstance(value, numpy.random.Generator))


def frozen(value: Any, depth: int = _DEPTH) -> Any:
    """Return all that is in a value, for `==`; tensors and what cannot be looked into by identity."""
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
    """Return what a unit could change on itself: copies of its buffers and of its attributes, with what is in them."""
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
    """Yield the names of what a call has changed on a unit."""
    for name, value in own_state(unit).items():
        old = before.get(name)
        if isinstance(value, Tensor) and isinstance(old, Tensor):
            same = _equal(old, value)
        else:
            same = type(old) is type(value) and old == value
        if not same:
            yield name


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same numbers; what is not a number on both sides counts as the same."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def updates_itself(unit: nn.Module) -> Iterator[str]:
    """Yield the names of what a unit that cannot be run would change: running statistics, known by their kind."""
    for name, module in unit.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats and module.training:
            yield dotted_name(name, "running_mean")


Listener = Callable[[nn.Module, str, bool], None]  # (module, attribute, whether it was written)


@contextmanager
def watch_access(modules: Iterable[nn.Module], listener: Listener) -> Iterator[None]:
    """Tell `listener` of each access to an attribute that holds a value: no method, child or parameter."""
    kinds: dict[type, Any] = {}
    before = [(module, type(module)) for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    compiled = {id(inner) for module, _ in before if _is_compiled(module) for inner in module.modules()}
    try:
        for module, kind in before:
            if id(module) not in compiled:
                if kind not in kinds:
                    kinds[kind] = _watched_kind(kind, listener)
                object.__setattr__(module, "__class__", kinds[kind])
        yield
    finally:
        for module, kind in before:
            object.__setattr__(module, "__class__", kind)


def _is_compiled(module: nn.Module) -> bool:
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # Nothing is compiled unless it was loaded.
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or vars(module).get("_compiled_call_impl") is not None


def _watched_kind(kind: Any, listener: Listener) -> Any:
    @functools.cache
    def is_code(name: str) -> bool:
        of_class = inspect.getattr_static(kind, name, None)
        of_every_module = hasattr(nn.Module, name) or name in OWN or name.startswith("__")
        return of_every_module or callable(of_class) or hasattr(type(of_class), "__get__")

    def holds_value(module: nn.Module, name: str) -> bool:
        """Return whether code that asks for it learns a value, be it that there is none."""
        table = object.__getattribute__(module, "__dict__")
        if name in table or name in table.get("_buffers", ()):
            return name not in OWN
        return not is_code(name) and name not in table.get("_modules", ()) and name not in table.get("_parameters", ())

    def read(self: Any, name: str) -> Any:
        if holds_value(self, name):
            listener(self, name, False)
        return kind.__getattribute__(self, name)

    def write(self: Any, name: str, value: Any) -> None:
        kind.__setattr__(self, name, value)
        if holds_value(self, name):
            listener(self, name, True)

    members = {"__getattribute__": read, "__setattr__": write}
    members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (kind,), members)
