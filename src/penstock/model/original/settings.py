"""What is set on a model's modules from outside: modes and plain attributes, looked at before each step.

Whoever trains a model sets things on it as he goes: `net.eval()`, `drop.p = 0.2`, `net.temperature *= 0.9`. A module's
`__dict__` holds all of that, and comparing it by identity with what was there the last time costs less than a
microsecond per module. Where a way to cut has a copy of a module, or a graph of its code, what is inside of its lists
and dicts counts as well: they were copied, or read, when the model was cut.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

AttributeChange = tuple[nn.Module, str]  # a module, and the name of an attribute that is another now, or gone

OWN = frozenset(nn.Module().__dict__)  # what every module has
BOXES = (list, tuple, set, frozenset, deque, dict, OrderedDict, defaultdict)
CONTAINERS = frozenset({*BOXES, Counter} - {frozenset})  # what may change in place, or hold what may
DEPTH = 4  # Levels of containers in containers.
OBJECTS = 2  # So many levels may be objects: further down, nothing is a setting.
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)
_ABSENT = object()


class ModuleSettings:
    """The attributes of modules as they were at the last look; of `copied` ones, what is inside of them too.

    With `objects`, also what is inside of objects that are no boxes, such as the configuration of a model.
    """

    def __init__(
        self, modules: Iterable[nn.Module], copied: Iterable[nn.Module] = (), *, objects: bool = False
    ) -> None:
        self._known = [(module, dict(vars(module))) for module in modules]
        self._by_module = {id(module): known for module, known in self._known}
        self._copied = list(copied)
        self._objects = objects
        self._tables: list[dict[str, Any]] = []
        self._takes: list[Callable[[dict[str, Any]], tuple[Any, ...]]] = []
        self._counts: list[int] = []
        self._flat: list[Any] = []
        self._inside: list[tuple[Any, list[Any], list[AttributeChange]]] = []  # a box, what was in it, whose it is
        self._note()

    def take_changes(self) -> list[AttributeChange]:
        """Return what has changed since the last look."""
        found: list[AttributeChange] = []
        same = self._is_all_the_same()
        if not same:
            for module, known in self._known:
                table = module.__dict__
                names = dict.fromkeys((*known, *table))
                found += [(module, name) for name in names if table.get(name, _ABSENT) is not known.get(name, _ABSENT)]
                known.clear()
                known.update(table)
        for box, contents, places in self._inside:
            now = _contents(box, self._objects)
            if len(now) != len(contents) or not all(map(is_, now, contents)):
                found += [place for place in places if place not in found]
        if found or not same:
            self._note()
        return found

    def _is_all_the_same(self) -> bool:
        """Return whether nothing changed: the common case, without a loop in Python over attributes."""
        if [*map(len, self._tables)] != self._counts:
            return False
        try:
            now = [take(table) for take, table in zip(self._takes, self._tables, strict=True)]
        except KeyError:
            return False
        return all(map(is_, chain.from_iterable(now), self._flat))

    def all(self) -> list[AttributeChange]:
        """Return every attribute, as if it had changed."""
        return [(module, name) for module, known in self._known for name in known]

    def is_unchanged(self, module: nn.Module, name: str) -> bool:
        return vars(module).get(name, _ABSENT) is self._by_module[id(module)].get(name, _ABSENT)

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute so that `take_changes` does not count it as set from outside."""
        module.__dict__[name] = self._by_module[id(module)][name] = value
        self._counts = []

    def _note(self) -> None:
        """Note all values in a row; and what is inside of the copied modules' attributes, of each container once."""
        names = [[name for name in known if name not in _TABLES] for _, known in self._known]
        self._tables = [module.__dict__ for module, _ in self._known]
        # For one name it returns no tuple.
        self._takes = [itemgetter(*each, each[-1]) if each else _nothing for each in names]
        self._counts = [*map(len, self._tables)]
        self._flat = [value for take, table in zip(self._takes, self._tables, strict=True) for value in take(table)]
        boxes: dict[int, tuple[Any, list[Any], list[AttributeChange]]] = {}
        for module in self._copied:
            for name, value in vars(module).items():
                if name not in _TABLES and _is_box(value, self._objects):
                    if id(value) not in boxes:
                        boxes[id(value)] = (value, _contents(value, self._objects), [])
                    boxes[id(value)][2].append((module, name))
        self._inside = [box for box in boxes.values() if box[1]]


# Parameters, buffers, children and hooks change in place.
_TABLES = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))


def _nothing(table: dict[str, Any]) -> tuple[Any, ...]:
    return ()


def _is_box(value: Any, objects: bool) -> bool:
    return type(value) in BOXES or (objects and _is_object(value))


def _is_object(value: Any) -> bool:
    """Return whether it is a configuration or the like: something with attributes that is neither code nor tensors."""
    return hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, type)) and not callable(value)


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if type(value) in BOXES else (*vars(value), *vars(value).values())


def _contents(value: Any, objects: bool, depth: int = DEPTH) -> list[Any]:
    found: list[Any] = []
    for member in _members(value):
        found.append(member)
        if depth and _is_box(member, objects and depth > DEPTH - OBJECTS):
            found += _contents(member, objects, depth - 1)
    return found


def value_key(value: Any, kept: list[Any], depth: int = DEPTH) -> Any:
    """Return equal keys for plain values that are equal, and containers and objects of such; else only for the same
    object.

    What goes by identity is put into `kept`, because an identity counts for as long as its object lives.
    """
    kind = type(value)
    if isinstance(value, _PLAIN):
        return kind, repr(value)
    if depth and kind in BOXES:
        return kind, tuple([value_key(member, kept, depth - 1) for member in _members(value)])
    kept.append(value)
    if depth > DEPTH - OBJECTS - 1 and _is_object(value):
        return id(value), tuple([value_key(member, kept, depth - 1) for member in _members(value)])
    return id(value)
