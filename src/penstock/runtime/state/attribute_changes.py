"""A look at the plain attributes of modules: what was there, so that a change can be seen, and put back.

Numbers, text and objects go by identity. Lists, dicts, sets, deques, tensors and generators also change in place: of
containers and generators the contents are remembered here, of tensors as a subclass of `Look` says. Where nothing has
changed, a look costs a comparison of pointers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.replay.recording.undo import CONTAINERS, DEPTH
from penstock.model.replay.tree import OWN

ABSENT = object()
Key = tuple[int, str]  # the table of a module's attributes, and a name there


def is_trained(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, by its kind or by its use."""
    return isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)


@contextmanager
def exchanged(entries: Sequence[tuple[Any, str, Any, Any]]) -> Iterator[None]:
    """Inside, entries of tables have other values: (table, name, value now, value inside)."""

    def put(table: Any, name: str, value: Any) -> None:
        if value is ABSENT:
            table.pop(name, None)
        else:
            table[name] = value

    try:
        for table, name, _, inside in entries:
            put(table, name, inside)
        yield
    finally:
        for table, name, now, _ in entries:
            put(table, name, now)


class Deep:
    """Something that may change in place, as it was."""

    __slots__ = ()

    def put_back(self) -> None:
        """Make it what it was, in place."""


class Drawn(Deep):
    """A generator of random numbers, and its state."""

    __slots__ = ("generator", "state")

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.state = generator, generator.get_state()

    def put_back(self) -> None:
        self.generator.set_state(self.state)


class Box(Deep):
    """A container as it was: its members, and of those that change in place what was in them."""

    __slots__ = ("deep", "keys", "members", "place", "seen")

    def __init__(self, place: Any) -> None:
        self.place = place
        taken = dict(place) if isinstance(place, dict) else {}  # in one go: other ranks' threads may have it too
        self.keys = tuple(taken)
        self.members = tuple(taken.values()) if isinstance(place, dict) else tuple(place)
        self.seen: Sequence[Any] = self.members
        self.deep = False

    def has_the_same(self) -> bool:
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
        if not self.has_the_same():
            self.place.clear()
            if isinstance(self.place, dict):
                for key, member in zip(self.keys, self.members, strict=True):
                    self.place[key] = member
            else:
                (self.place.update if isinstance(self.place, set) else self.place.extend)(self.members)
        if self.deep:
            for each in self.seen:
                if isinstance(each, Deep):
                    each.put_back()


class ModuleSeen:
    """The attributes of one module as they were; `table` is where they are, among others that every module has."""

    __slots__ = ("_size", "_take", "_values", "deep", "seen", "table")

    def __init__(self, table: dict[str, Any], values: dict[str, Any], seen: dict[str, Any]) -> None:
        self.table, self.seen = table, seen
        self.deep = [name for name, value in seen.items() if isinstance(value, Deep)]
        self._size = len(table)
        self._values = (*values.values(), *list(values.values())[:1])
        self._take = itemgetter(*values, next(iter(values))) if values else None  # of two names or more: a tuple

    def has_the_same(self) -> bool:
        """Whether all attributes are still the same objects."""
        if len(self.table) != self._size:
            return False
        try:
            return self._take is None or all(map(is_, self._take(self.table), self._values))
        except KeyError:  # one was removed, and another put there
            return False

    def with_other(self, seen: dict[str, Any]) -> ModuleSeen:
        """The same values, in some of which something has changed."""
        return ModuleSeen(self.table, dict(zip(self.seen, self._values, strict=False)), {**self.seen, **seen})

    def put_back(self) -> None:
        """The same objects again, with what was in them."""
        if not self.has_the_same():
            for name in [name for name in self.table if name not in OWN and name not in self.seen]:
                del self.table[name]
            self.table.update(zip(self.seen, self._values, strict=False))
        for name in self.deep:
            self.seen[name].put_back()


class Look:
    """Looks at attributes, again and again: what has not changed since the last time is not gone through."""

    def __init__(self) -> None:
        self._last: dict[int, ModuleSeen] = {}

    def look(self, tables: Mapping[int, dict[str, Any]]) -> dict[int, ModuleSeen]:
        """What is in these tables of attributes, which go by their identity."""
        self._last = {number: self._look(number, table) for number, table in tables.items()}
        return self._last

    def _look(self, number: int, table: dict[str, Any]) -> ModuleSeen:
        last = self._last.get(number)
        if last is None or last.table is not table or not last.has_the_same():
            old = {} if last is None else last.seen
            values = {name: value for name, value in table.items() if name not in OWN}
            seen = {name: self._see((number, name), value, old.get(name), DEPTH) for name, value in values.items()}
            return ModuleSeen(table, values, seen)
        changed = {}
        for name in last.deep:
            seen = self._see((number, name), table[name], last.seen[name], DEPTH)
            if seen is not last.seen[name]:
                changed[name] = seen
        return last.with_other(changed) if changed else last

    def _see(self, key: Key, value: Any, before: Any, depth: int) -> Any:
        """What was seen before, if nothing has changed."""
        if isinstance(value, Tensor):
            return self._see_tensor(key, value, before)
        if type(value) in CONTAINERS and depth:
            return self._see_box(key, value, before, depth)
        if isinstance(value, torch.Generator):
            drawn = Drawn(value)
            same = isinstance(before, Drawn) and before.generator is value and torch.equal(before.state, drawn.state)
            return before if same else drawn
        return value

    @abstractmethod
    def _see_tensor(self, key: Key, tensor: Tensor, before: Any) -> Any:
        """The tensor itself, or something `Deep` where its contents count."""

    def _see_box(self, key: Key, value: Any, before: Any, depth: int) -> Any:
        known = isinstance(before, Box) and before.place is value and before.has_the_same()
        if known and not before.deep:
            return before
        box = Box(value)
        kinds = set(map(type, box.members))
        if kinds.isdisjoint(CONTAINERS) and not any(issubclass(kind, (Tensor, torch.Generator)) for kind in kinds):
            return value if isinstance(value, tuple) else box  # a long list of numbers need not be gone through
        old = before.seen if isinstance(before, Box) else []
        old = [*old[: len(box.members)], *[None] * (len(box.members) - len(old))]
        box.seen = [self._see(key, one, other, depth - 1) for one, other in zip(box.members, old, strict=True)]
        if known and all(map(is_, box.seen, before.seen)):
            return before
        box.deep = any(isinstance(one, Deep) for one in box.seen)
        return value if isinstance(value, tuple) and not box.deep else box
