"""What a model keeps from one call to the next on the modules whose code is glue.

Every stage runs the glue for itself, up to its own last unit call. So what the glue keeps (a counter, a moving mean, a
memory) is right everywhere only if it is written where all that read it have passed: what is kept after unit call 3 and
read, the next time, before unit call 2, is missing on the stages in between; and what is made of units' values is made
of stand-ins elsewhere. Caches that are made on the way and used from there on are fine.

Whether something is carried over shows in a second run, made only if the first left anything behind: which of the
attributes that the first has written are read, and where.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model.names import dotted_name
from penstock.model.original.settings import OWN
from penstock.model.replay.recording.snapshot import CONTAINERS, PLAIN, frozen, has_fields
from penstock.model.replay.recording.unit_calls import tensors_in

Attribute = tuple[str, str]  # a module's name, an attribute of it


class GlueState:
    """The attributes of the modules of a tree that are no units."""

    def __init__(self, tree: nn.Module) -> None:
        self._holders = dict(_glue("", tree))
        self._names = {id(holder): name for name, holder in self._holders.items()}
        self._second_run = False
        self._last = self._snapshot()
        self._written: dict[Attribute, int] = {}  # Number of unit calls before it.
        self._first: dict[Attribute, int] = {}
        self._read: dict[Attribute, int] = {}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the glue's modules hold beside parameters and buffers, with its name."""
        for (holder, name), (value, _) in self._last.items():
            for tensor in tensors_in(value, 1):
                yield dotted_name(holder, name), tensor

    def note_writes(self, position: int) -> None:
        """Note, before a unit call and at the end, what was written since the last look."""
        now = self._snapshot()
        for attribute, token in now.items():
            if attribute not in self._last or _differ(self._last[attribute], token):
                self._first.setdefault(attribute, position)
                self._written[attribute] = position
        self._last = now

    def left(self) -> dict[str, list[Tensor]]:
        """Return the tensors that the run has left behind, by the name of where."""
        return {dotted_name(*attribute): tensors_in(self._last[attribute][0], 1) for attribute in self._written}

    def begin_second_run(self) -> None:
        self._first.clear()
        self._second_run = True

    def read(self, module: nn.Module, name: str, position: int) -> None:
        attribute = (self._names.get(id(module), ""), name)
        if self._second_run and id(module) in self._names and attribute in self._written:
            self._read.setdefault(attribute, position)

    def check(self) -> None:
        """Refuse, after the second run, what is read before the place where it is written."""
        for attribute, read in self._read.items():
            value = self._last[attribute][0] if attribute in self._last else None
            rewritten = attribute in self._first  # the second run has written it too
            last = self._first[attribute] if rewritten and isinstance(value, CONTAINERS) else self._written[attribute]
            holder, name = attribute
            shared = name in self._holders[holder]._buffers or has_fields(value)  # The stages of a process share it.
            if (rewritten and shared) or (read < last and not has_fields(value)):
                raise ModelError(
                    f"the code between the units keeps {dotted_name(holder, name)} from one call of the model to the "
                    f"next; stages end at their last unit and would not all see what it was set to. Keep it in a "
                    f"module that is a unit, or pass it in as an input"
                )

    def _snapshot(self) -> dict[Attribute, Any]:
        """Return the value of each attribute, with a frozen copy of what is in it."""
        found: dict[Attribute, Any] = {}
        for name, holder in self._holders.items():
            values = {key: value for key, value in vars(holder).items() if key not in OWN}
            found.update({(name, key): (value, frozen(value)) for key, value in (values | holder._buffers).items()})
        return found


def _glue(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if not getattr(type(module), "is_asked", False) and not isinstance(module, torch.jit.ScriptModule):
        yield name, module
        for child_name, child in module.named_children():
            yield from _glue(dotted_name(name, child_name), child)


def _differ(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    same = one[0] is other[0] or isinstance(one[0], PLAIN)
    return not same or one[1] != other[1]
