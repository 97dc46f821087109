"""What a model keeps from one call to the next: on its units, and on the modules whose code is glue.

Every stage runs the glue for itself, up to its own last unit call. So what the glue keeps (a counter, a moving mean, a
memory) is right everywhere only if it is written where all that read it have passed. What is kept after unit call 3
and read, the next time, before unit call 2, is missing on the stages in between; and what is made of units' values is
made of stand-ins elsewhere. Both would be wrong in silence. Caches that are made on the way and used from there on
are fine.

Whether something is carried over shows in a second run: which of the attributes that the first has written are read,
and where. That run is made only if the first left anything behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.errors import ModelError
from penstock.model.replay.structure import tensors_in
from penstock.model.replay.tree import OWN

__all__ = ["Carried", "kept_by", "own_state", "updates_itself"]

_PLAIN = (int, float, str, bytes, torch.Size, torch.dtype, torch.device)
_CONTAINERS = (list, dict, set, deque)
Place = tuple[str, str]  # a module's name, an attribute of it


class Carried:
    """The attributes of the modules of a tree that are no units."""

    def __init__(self, tree: nn.Module) -> None:
        self._holders = dict(_glue("", tree))
        self._seen = self._look()
        self._written: dict[Place, int] = {}  # after how many unit calls
        self._first: dict[Place, int] = {}
        self._read: dict[Place, int] = {}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What the glue's modules hold beside parameters and buffers, with its name."""
        for (holder, name), (value, _) in self._seen.items():
            for tensor in tensors_in(value, 1):
                yield _joined(holder, name), tensor

    def look(self, position: int) -> None:
        """Before a unit call, and at the end: what was written since the last look."""
        now = self._look()
        for place, token in now.items():
            if place not in self._seen or _differ(self._seen[place], token):
                self._first.setdefault(place, position)
                self._written[place] = position
        self._seen = now

    def left(self) -> dict[str, list[Tensor]]:
        """The tensors that the run has left behind, by the name of where."""
        return {_joined(*place): tensors_in(self._seen[place][0], 1) for place in self._written}

    @contextmanager
    def watched(self, position: Callable[[], int]) -> Iterator[None]:
        """Around the second run: reads of what the first has written are noted."""
        self._first.clear()
        kinds = {name: type(holder) for name, holder in self._holders.items()}
        try:
            for name, holder in self._holders.items():
                written = {attribute for where, attribute in self._written if where == name}
                if written:
                    holder.__class__ = _watched(kinds[name], written, self._teller(name, position))
            yield
        finally:
            for name, holder in self._holders.items():
                holder.__class__ = kinds[name]

    def check(self) -> None:
        """After the second run: nothing may be read before the place where it is written."""
        for place, read in self._read.items():
            value = self._seen[place][0] if place in self._seen else None
            again = place in self._first  # the second run has written it too
            last = self._first[place] if again and isinstance(value, _CONTAINERS) else self._written[place]
            evolves = again and place[1] in self._holders[place[0]]._buffers
            if read < last or evolves:
                raise ModelError(
                    f"the code between the units keeps {_joined(*place)} from one call of the model to the next; "
                    f"stages end at their last unit and would not all see what it was set to. Keep it in a module "
                    f"that is a unit, or pass it in as an input"
                )

    def _teller(self, name: str, position: Callable[[], int]) -> Callable[[str], None]:
        def tell(attribute: str) -> None:
            self._read.setdefault((name, attribute), position())

        return tell

    def _look(self) -> dict[Place, Any]:
        found: dict[Place, Any] = {}
        for name, holder in self._holders.items():
            values = {key: value for key, value in vars(holder).items() if key not in OWN}
            found.update({(name, key): _token(value) for key, value in (values | holder._buffers).items()})
        return found


def _glue(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules outside of units."""
    if not getattr(type(module), "is_asked", False) and not isinstance(module, torch.jit.ScriptModule):
        yield name, module
        for child_name, child in module.named_children():
            yield from _glue(_joined(name, child_name), child)


def _token(value: Any) -> tuple[Any, tuple[Any, ...]]:
    """A value, and of what changes in place what is in it."""
    if isinstance(value, Tensor):
        return value, () if value.is_inference() else (value._version,)
    if isinstance(value, dict):
        return value, (*value, *value.values())
    return value, tuple(value) if isinstance(value, _CONTAINERS) else ()


def _differ(one: tuple[Any, tuple[Any, ...]], other: tuple[Any, tuple[Any, ...]]) -> bool:
    if not _same(one[0], other[0]) or len(one[1]) != len(other[1]):
        return True
    return not all(map(_same, one[1], other[1]))


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)


def _watched(kind: Any, written: set[str], tell: Callable[[str], None]) -> Any:
    def read(self: Any, name: str) -> Any:
        if name in written:
            tell(name)
        return kind.__getattribute__(self, name)

    members = {"__getattribute__": read, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (kind,), members)


def own_state(unit: nn.Module) -> dict[str, Any]:
    """What a unit could change on itself: copies of its buffers, and its plain attributes."""
    found: dict[str, Any] = {}
    for name, holder in unit.named_modules():
        for key, value in vars(holder).items():
            if key not in OWN and isinstance(value, _PLAIN):
                found[_joined(name, key)] = value
        for key, buffer in holder._buffers.items():
            if buffer is not None:
                found[_joined(name, key)] = buffer.detach().clone()
    return found


def kept_by(unit: nn.Module, before: dict[str, Any]) -> str:
    """The name of something that a call has changed on a unit, or nothing."""
    for name, value in own_state(unit).items():
        old = before.get(name)
        if isinstance(value, Tensor):
            if not isinstance(old, Tensor) or old.shape != value.shape or not torch.equal(old, value):
                return name
        elif not _same(value, old):
            return name
    return ""


def updates_itself(unit: nn.Module) -> str:
    """As `kept_by`, for a unit that cannot be run: running statistics are known by their kind."""
    for name, module in unit.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats and module.training:
            return _joined(name, "running_mean")
    return ""


def _joined(name: str, inner: str) -> str:
    return f"{name}.{inner}" if name else inner
