"""Who reads and who writes the attributes of modules while a model's code runs on an example.

Python has no hook for that on an instance, so for the time of the run each module is of a class derived from its own
that tells of every access. Compiled and scripted modules are left as they are: their code is not Python's, or would be
compiled once more.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.model.original.settings import OWN

Listener = Callable[[nn.Module, str, bool], None]  # (module, attribute, whether it was written)


@contextmanager
def watch_access(modules: Iterable[nn.Module], listener: Listener) -> Iterator[None]:
    """`listener` hears of each access to an attribute that holds a value: no method, child or parameter."""
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
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # where it was not loaded, nothing is compiled
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or vars(module).get("_compiled_call_impl") is not None


def _watched_kind(kind: Any, listener: Listener) -> Any:
    @functools.cache
    def is_code(name: str) -> bool:
        of_class = inspect.getattr_static(kind, name, None)
        of_every_module = hasattr(nn.Module, name) or name in OWN or name.startswith("__")
        return of_every_module or callable(of_class) or hasattr(type(of_class), "__get__")

    def holds_value(module: nn.Module, name: str) -> bool:
        """Whether code that asks for it learns a value, be it that there is none."""
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
