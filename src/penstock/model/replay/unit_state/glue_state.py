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

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model.replay.recording.nested_values import tensors_in
from penstock.model.replay.recording.snapshot import CONTAINERS, PLAIN, frozen, has_fields
from penstock.model.replay.tree import OWN
from penstock.model.use_names import dotted_name

Place = tuple[str, str]  # a module's name, an attribute of it


class GlueState:
    """The attributes of the modules of a tree that are no units."""

    def __init__(self, tree: nn.Module) -> None:
        self._holders = dict(_glue("", tree))
        self._names = {id(holder): name for name, holder in self._holders.items()}
        self._second_run = False
        self._seen = self._look()
        self._written: dict[Place, int] = {}  # after how many unit calls
        self._first: dict[Place, int] = {}
        self._read: dict[Place, int] = {}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What the glue's modules hold beside parameters and buffers, with its name."""
        for (holder, name), (value, _) in self._seen.items():
            for tensor in tensors_in(value, 1):
                yield dotted_name(holder, name), tensor

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
        return {dotted_name(*place): tensors_in(self._seen[place][0], 1) for place in self._written}

    def begin_second_run(self) -> None:
        """A second run begins: reads of what the first has written count (see `read`)."""
        self._first.clear()
        self._second_run = True

    def read(self, module: nn.Module, attribute: str, position: int) -> None:
        """Code asks for an attribute of a module."""
        place = (self._names.get(id(module), ""), attribute)
        if self._second_run and id(module) in self._names and place in self._written:
            self._read.setdefault(place, position)

    def check(self) -> None:
        """After the second run: nothing may be read before the place where it is written."""
        for place, read in self._read.items():
            value = self._seen[place][0] if place in self._seen else None
            rewritten = place in self._first  # the second run has written it too
            last = self._first[place] if rewritten and isinstance(value, CONTAINERS) else self._written[place]
            shared = place[1] in self._holders[place[0]]._buffers or has_fields(value)  # by the stages of a process
            if (rewritten and shared) or (read < last and not has_fields(value)):
                raise ModelError(
                    f"the code between the units keeps {dotted_name(*place)} from one call of the model to the next; "
                    f"stages end at their last unit and would not all see what it was set to. Keep it in a module "
                    f"that is a unit, or pass it in as an input"
                )

    def _look(self) -> dict[Place, Any]:
        """Each value, and of what changes in place what is in it."""
        found: dict[Place, Any] = {}
        for name, holder in self._holders.items():
            values = {key: value for key, value in vars(holder).items() if key not in OWN}
            found.update({(name, key): (value, frozen(value)) for key, value in (values | holder._buffers).items()})
        return found


def _glue(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules outside of units."""
    if not getattr(type(module), "is_asked", False) and not isinstance(module, torch.jit.ScriptModule):
        yield name, module
        for child_name, child in module.named_children():
            yield from _glue(dotted_name(name, child_name), child)


def _differ(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    same = one[0] is other[0] or isinstance(one[0], PLAIN)
    return not same or one[1] != other[1]
