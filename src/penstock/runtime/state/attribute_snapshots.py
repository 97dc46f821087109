"""Snapshots of the plain attributes of modules, so that a change can be noticed and undone.

Numbers, text and objects go by identity. Lists, dicts, sets, deques, tensors and generators also change in place: of
containers and generators the contents are remembered here, of tensors what a subclass decides. Where nothing has
changed, a snapshot costs a comparison of pointers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.original.settings import CONTAINERS, DEPTH, OWN

ABSENT = object()
Key = tuple[int, str]  # the table of a module's attributes, and a name there


def is_trained(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, by its kind or by its use."""
    return isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)


class Restorable:
    """Something that may change in place, as it was."""

    __slots__ = ()

    def put_back(self) -> None:
        """Make it what it was, in place."""


class GeneratorSnapshot(Restorable):
    """A generator of random numbers, and the state that it was in."""

    __slots__ = ("generator", "state")

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.state = generator, generator.get_state()

    def put_back(self) -> None:
        self.generator.set_state(self.state)


class ContainerSnapshot(Restorable):
    """A container as it was: its members, and of those that change in place what was in them."""

    __slots__ = ("captured", "deep", "keys", "members", "place")

    def __init__(self, place: Any) -> None:
        self.place = place
        taken = dict(place) if isinstance(place, dict) else {}  # in one go: other ranks' threads may have it too
        self.keys = tuple(taken)
        self.members = tuple(taken.values()) if isinstance(place, dict) else tuple(place)
        self.captured: Sequence[Any] = self.members
        self.deep = False

    def is_unchanged(self) -> bool:
        """Whether its members are still the same objects."""
        if len(self.place) != len(self.members):
            return False
        if not isinstance(self.place, dict):
            return all(map(is_, self.place, self.members))
        return all(map(is_, self.place.values(), self.members)) and all(map(is_, self.place, self.keys))

    def filled(self, members: Iterable[Any]) -> Any:
        """Another of the kind."""
        if isinstance(self.place, deque):
            return deque(members, self.place.maxlen)
        if not isinstance(self.place, dict):
            return type(self.place)(members)
        made = self.place.copy()
        made.clear()
        for key, member in zip(self.keys, members, strict=True):
            made[key] = member
        return made

    def put_back(self) -> None:
        if not self.is_unchanged():
            self.place.clear()
            if isinstance(self.place, dict):
                for key, member in zip(self.keys, self.members, strict=True):
                    self.place[key] = member
            else:
                (self.place.update if isinstance(self.place, set) else self.place.extend)(self.members)
        if self.deep:
            for each in self.captured:
                if isinstance(each, Restorable):
                    each.put_back()


class ModuleSnapshot:
    """The attributes of one module as they were; `table` is where they are, among others that every module has."""

    __slots__ = ("_size", "_take", "_values", "captured", "deep", "table")

    def __init__(self, table: dict[str, Any], values: dict[str, Any], captured: dict[str, Any]) -> None:
        self.table, self.captured = table, captured
        self.deep = [name for name, value in captured.items() if isinstance(value, Restorable)]
        self._size = len(table)
        self._values = (*values.values(), *list(values.values())[:1])
        self._take = itemgetter(*values, next(iter(values))) if values else None  # of two names or more: a tuple

    def is_unchanged(self) -> bool:
        """Whether all attributes are still the same objects."""
        if len(self.table) != self._size:
            return False
        try:
            return self._take is None or all(map(is_, self._take(self.table), self._values))
        except KeyError:  # one was removed, and another put there
            return False

    def with_other(self, captured: dict[str, Any]) -> ModuleSnapshot:
        """The same values, in some of which something has changed."""
        return ModuleSnapshot(
            self.table, dict(zip(self.captured, self._values, strict=False)), {**self.captured, **captured}
        )

    def put_back(self) -> None:
        """The same objects again, with what was in them."""
        if not self.is_unchanged():
            for name in [name for name in self.table if name not in OWN and name not in self.captured]:
                del self.table[name]
            self.table.update(zip(self.captured, self._values, strict=False))
        for name in self.deep:
            self.captured[name].put_back()


class AttributeSnapshots:
    """Takes snapshots of attributes, one after the other; what has not changed since the last one is shared."""

    def __init__(self) -> None:
        self._last: dict[int, ModuleSnapshot] = {}

    def take(self, tables: Mapping[int, dict[str, Any]]) -> dict[int, ModuleSnapshot]:
        """What is in these tables of attributes, which go by their identity."""
        self._last = {number: self._take_module(number, table) for number, table in tables.items()}
        return self._last

    def _take_module(self, number: int, table: dict[str, Any]) -> ModuleSnapshot:
        last = self._last.get(number)
        if last is None or last.table is not table or not last.is_unchanged():
            old = {} if last is None else last.captured
            values = {name: value for name, value in table.items() if name not in OWN}
            captured = {
                name: self._capture((number, name), value, old.get(name), DEPTH) for name, value in values.items()
            }
            return ModuleSnapshot(table, values, captured)
        changed = {}
        for name in last.deep:
            captured = self._capture((number, name), table[name], last.captured[name], DEPTH)
            if captured is not last.captured[name]:
                changed[name] = captured
        return last.with_other(changed) if changed else last

    def _capture(self, key: Key, value: Any, before: Any, depth: int) -> Any:
        """What was captured before, if nothing has changed."""
        if isinstance(value, Tensor):
            return self._capture_tensor(key, value, before)
        if type(value) in CONTAINERS and depth:
            return self._capture_container(key, value, before, depth)
        if isinstance(value, torch.Generator):
            drawn = GeneratorSnapshot(value)
            same = (
                isinstance(before, GeneratorSnapshot)
                and before.generator is value
                and torch.equal(before.state, drawn.state)
            )
            return before if same else drawn
        return value

    @abstractmethod
    def _capture_tensor(self, key: Key, tensor: Tensor, before: Any) -> Any:
        """The tensor itself, or something `Restorable` where its contents count."""

    def _capture_container(self, key: Key, value: Any, before: Any, depth: int) -> Any:
        known = isinstance(before, ContainerSnapshot) and before.place is value and before.is_unchanged()
        if known and not before.deep:
            return before
        box = ContainerSnapshot(value)
        kinds = set(map(type, box.members))
        if kinds.isdisjoint(CONTAINERS) and not any(issubclass(kind, (Tensor, torch.Generator)) for kind in kinds):
            return value if isinstance(value, tuple) else box  # a long list of numbers need not be gone through
        old = before.captured if isinstance(before, ContainerSnapshot) else []
        old = [*old[: len(box.members)], *[None] * (len(box.members) - len(old))]
        box.captured = [self._capture(key, one, other, depth - 1) for one, other in zip(box.members, old, strict=True)]
        if known and all(map(is_, box.captured, before.captured)):
            return before
        box.deep = any(isinstance(one, Restorable) for one in box.captured)
        return value if isinstance(value, tuple) and not box.deep else box


class TensorsAndAttributes(AttributeSnapshots):
    """Attributes, with their tensors in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def _capture_tensor(self, key: Key, tensor: Tensor, before: Any) -> Any:
        if is_trained(tensor) or tensor.requires_grad:  # or it belongs to a graph
            return tensor
        self.tensors.append(tensor)
        return before if isinstance(before, _TensorOnly) and before.tensor is tensor else _TensorOnly(tensor)


class _TensorOnly(Restorable):
    """A tensor, whose contents are remembered elsewhere."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
