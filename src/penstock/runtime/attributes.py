"""The plain attributes of a stage whose forward runs a second time: counters, memories, caches.

As with buffers, a recomputed forward must see what the microbatch's first forward saw, and leave no trace. So each
module's attributes are looked at before and behind a forward that will run again; those that any forward has changed
are exchanged around the recomputation for what they were, and put back. Only those: what anything but a forward sets
in between, such as weights that were gathered, is not undone.

Numbers, text and objects go by identity. Lists, dicts, sets, deques and tensors also change in place: of these, copies
are made, and the recomputation gets a copy too, so that what others hold stays as it is. Where nothing has changed, a
look costs a comparison of pointers, and all microbatches share what was seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.model.replay.tree import OWN
from penstock.model.replay.undo import CONTAINERS, DEPTH
from penstock.runtime.buffers import SMALL_BYTES, version_of
from penstock.runtime.memory import copy_like

__all__ = ["Attributes", "Seen"]

_ABSENT = object()
Key = tuple[int, str]  # the table of a module's attributes, and a name there


class _Tensor:
    """A tensor as it was; a copy only where it may be written to."""

    __slots__ = ("copy", "tensor", "version")

    def __init__(self, tensor: Tensor, copied: bool) -> None:
        self.tensor, self.version = tensor, version_of(tensor)
        self.copy = copy_like(tensor.detach()) if copied else None

    def is_as_it_was(self) -> bool:
        """Versions do not tell all: batch norm writes past them."""
        if version_of(self.tensor) != self.version:
            return False
        plain = type(self.tensor) is Tensor and self.tensor.layout is torch.strided and not self.tensor.is_meta
        return self.copy is None or not plain or torch.equal(self.tensor, self.copy)


class _Drawn:
    """A generator of random numbers, and its state."""

    __slots__ = ("generator", "state")

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.state = generator, generator.get_state()


class _Box:
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


_DEEP = (_Tensor, _Drawn, _Box)


class _Module:
    """The attributes of one module as they were; `table` is where they are, among others that every module has."""

    __slots__ = ("_size", "_take", "_values", "deep", "seen", "table")

    def __init__(self, table: dict[str, Any], values: dict[str, Any], seen: dict[str, Any]) -> None:
        self.table, self.seen = table, seen
        self.deep = [name for name, value in seen.items() if isinstance(value, _DEEP)]
        self._size = len(table)
        self._values = (*values.values(), *list(values.values())[:1])
        self._take = itemgetter(*values, next(iter(values))) if values else None  # of two names or more: a tuple

    def has_the_same(self) -> bool:
        if len(self.table) != self._size:
            return False
        try:
            return self._take is None or all(map(is_, self._take(self.table), self._values))
        except KeyError:  # one was removed, and another put there
            return False

    def with_other(self, seen: dict[str, Any]) -> _Module:
        """The same values, in some of which something has changed."""
        return _Module(self.table, dict(zip(self.seen, self._values, strict=False)), {**self.seen, **seen})


Seen = Mapping[int, _Module]  # by table


class Attributes:
    """All plain attributes of a stage's modules."""

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        self._module = module
        self._last: dict[int, _Module] = {}
        self._moving: dict[Key, dict[str, Any]] = {}  # the tables of those that forwards change
        self._written: dict[Key, bool] = {}  # whether the tensors there are written to in place, once a forward told
        self._untold: list[tuple[Key, _Tensor]] = []
        self._copying = True

    @property
    def in_use(self) -> bool:
        """Whether any forward of this stage was looked at: where nothing is recomputed, none is."""
        return bool(self._last)

    def before(self) -> Seen:
        """Ahead of a forward that will run again: what the attributes are."""
        running = getattr(self._module, "running_modules", self._module.modules)
        self._untold, self._copying = [], True
        tables = {id(vars(module)): vars(module) for module in running()}
        self._last = {number: self._look(number, table) for number, table in tables.items()}
        return self._last

    def after(self, was: Seen) -> None:
        """Behind it: which of them it changed."""
        for key, then in self._untold:
            self._written[key] = self._written.get(key, False) or not then.is_as_it_was()
        for key, then in self._untold:
            if not self._written[key] and not _is_small(then.tensor):
                then.copy = None
        self._untold, self._copying = [], False
        now = {number: self._look(number, module.table) for number, module in was.items()}
        self._last = now
        for number, module in was.items():
            if now[number] is not module:
                old, new = module.seen, now[number].seen
                for name in {*old, *new}:
                    if old.get(name, _ABSENT) is not new.get(name, _ABSENT):
                        self._moving[number, name] = module.table

    def as_they_were(self, was: Seen) -> _Exchanged:
        """A context in which the stage's modules have the attributes of that time."""
        made: dict[int, Any] = {}
        exchange = []
        for key, table in self._moving.items():
            number, name = key
            if number in was:
                now, then = table.get(name, _ABSENT), was[number].seen.get(name, _ABSENT)
                exchange.append((table, name, now, self._again(key, then, made)))
        return _Exchanged(exchange)

    # -- what is there

    def _look(self, number: int, table: dict[str, Any]) -> _Module:
        last = self._last.get(number)
        if last is None or last.table is not table or not last.has_the_same():
            old = {} if last is None else last.seen
            values = {name: value for name, value in table.items() if name not in OWN}
            seen = {name: self._see((number, name), value, old.get(name), DEPTH) for name, value in values.items()}
            return _Module(table, values, seen)
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
            drawn = _Drawn(value)
            same = isinstance(before, _Drawn) and before.generator is value and torch.equal(before.state, drawn.state)
            return before if same else drawn
        return value

    def _see_tensor(self, key: Key, tensor: Tensor, before: Any) -> Any:
        if isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf):
            return tensor  # it is trained
        known = isinstance(before, _Tensor) and before.tensor is tensor
        if known and before.version != version_of(tensor):
            self._written[key] = True
        written = self._written.get(key)
        copied = self._copying and (written is not False or _is_small(tensor))
        if known and not written and before.version == version_of(tensor) and (before.copy is not None or not copied):
            return before
        seen = _Tensor(tensor, copied)
        if written is None and self._copying:
            self._untold.append((key, seen))
        return seen

    def _see_box(self, key: Key, value: Any, before: Any, depth: int) -> Any:
        known = isinstance(before, _Box) and before.place is value and before.has_the_same()
        if known and not before.deep:
            return before
        box = _Box(value)
        kinds = set(map(type, box.members))
        if kinds.isdisjoint(CONTAINERS) and not any(issubclass(kind, (Tensor, torch.Generator)) for kind in kinds):
            return value if isinstance(value, tuple) else box  # a long list of numbers need not be gone through
        old = before.seen if isinstance(before, _Box) else []
        old = [*old[: len(box.members)], *[None] * (len(box.members) - len(old))]
        box.seen = [self._see(key, one, other, depth - 1) for one, other in zip(box.members, old, strict=True)]
        if known and all(map(is_, box.seen, before.seen)):
            return before
        box.deep = any(isinstance(one, _DEEP) for one in box.seen)
        return value if isinstance(value, tuple) and not box.deep else box

    # -- what was there

    def _again(self, key: Key, seen: Any, made: dict[int, Any]) -> Any:
        """A value like the one that was seen; what two places shared, they share again."""
        if isinstance(seen, _Tensor):
            number = id(seen.tensor)
            if number not in made:
                made[number] = self._tensor_again(key, seen)
        elif isinstance(seen, _Box):
            number = id(seen.place)
            if number not in made:
                made[number] = seen.filled([self._again(key, one, made) for one in seen.seen])
        elif isinstance(seen, _Drawn):
            number = id(seen.generator)
            if number not in made:
                made[number] = torch.Generator(device=seen.generator.device)
                made[number].set_state(seen.state)
        else:
            return seen
        return made[number]

    def _tensor_again(self, key: Key, seen: _Tensor) -> Tensor:
        if not self._written.get(key) and version_of(seen.tensor) == seen.version:
            return seen.tensor
        if seen.copy is None or seen.tensor.requires_grad:
            what = "and not in the first forward that had it, so no copy was kept"
            if seen.tensor.requires_grad:
                what = "and it belongs to the graph of an earlier forward"
            raise RunError(
                f"stage {self._stage}: a tensor in the attribute {key[1]} was written to between the forward of a "
                f"microbatch and its recomputation, {what}; use recompute='never', or make it a buffer"
            )
        return copy_like(seen.copy)


class _Exchanged:
    def __init__(self, exchange: list[tuple[dict[str, Any], str, Any, Any]]) -> None:
        self._exchange = exchange

    def __enter__(self) -> None:
        for table, name, _, then in self._exchange:
            _put(table, name, then)

    def __exit__(self, *_: object) -> None:
        for table, name, now, _then in self._exchange:
            _put(table, name, now)


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        table.pop(name, None)
    else:
        table[name] = value


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= SMALL_BYTES
