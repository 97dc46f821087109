"""Lists, dicts and objects that a unit changes beside returning something.

Hooks that collect hidden states or attention maps append to a list that a context variable holds; other models hand a
list, a dict or an object with fields from block to block. What a call has changed there is one more output of it: where
the unit does not run, the same is changed to what was received. Sinks are looked for in the call's arguments and in
context variables.
"""

from __future__ import annotations

import contextvars
import sys
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from penstock.model.replay.recording.snapshot import PLAIN, has_fields

Path = tuple[Any, ...]
_FLAG = "_output_capturing_hooks_installed"
_DEEP = 4
_DICTS = (dict, UserDict, OrderedDict, defaultdict)
_LISTS = (list, UserList, deque)


class Sinks:
    """The lists, dicts, sets and fields that a call can reach, and how they were before it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._found: dict[Path, Any] = {}
        seen: set[int] = set()
        for place, value in [*enumerate(args), *kwargs.items()]:
            self._found.update(_walk(value, (place,), _DEEP, seen))
        for variable, value in contextvars.copy_context().items():
            if not has_fields(value):
                self._found.update(_walk(value, (None, variable.name), _DEEP, seen))
        self._before = {path: _copied(sink) for path, sink in self._found.items()}

    def added(self) -> dict[Path, Any]:
        """Return what has changed since, by where."""
        changes = {path: _change(self._before[path], sink) for path, sink in self._found.items()}
        return {path: change for path, change in changes.items() if change is not None}

    def put(self, added: dict[Path, Any]) -> bool:
        """Change the same here; return False if there is no such place."""
        for path, change in added.items():
            sink = self._found.get(path)
            if sink is None or _kind(sink) != change[0]:
                return False
            _apply(sink, change)
        return True

    def run(self, function: Callable[[], Any]) -> tuple[Any, dict[Path, Any]]:
        """Return what a function returns and changes; the sinks are as before."""
        try:
            output = function()
            return output, self.added()
        finally:
            for path, sink in self._found.items():
                back = _change(sink, self._before[path])
                if back is not None:
                    _apply(sink, back)


def _kind(sink: Any) -> str:
    if isinstance(sink, _DICTS):
        return "dict"
    return "set" if isinstance(sink, set) else "list"


def _copied(sink: Any) -> Any:
    return dict(sink) if isinstance(sink, _DICTS) else set(sink) if isinstance(sink, set) else list(sink)


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and one == other)


def _change(before: Any, now: Any) -> tuple[Any, ...] | None:
    """Return how to make `now` of what it was before, or None: (kind, what stays or goes, what is put there)."""
    kind = _kind(now)
    if kind == "dict":
        new = {key: now[key] for key in now if key not in before or not _same(before[key], now[key])}
        gone = tuple(key for key in before if key not in now)
        return (kind, gone, new) if new or gone else None
    if kind == "set":
        return None if before == now else (kind, None, list(now))
    start = 0
    for one, other in zip(before, now, strict=False):
        if not _same(one, other):
            break
        start += 1
    return (kind, start, list(now)[start:]) if start < max(len(before), len(now)) else None


def _apply(sink: Any, change: tuple[Any, ...]) -> None:
    kind, what, new = change
    if kind == "dict":
        for key in what:
            sink.pop(key, None)
        sink.update(new)
    elif kind == "set":
        sink.clear()
        sink.update(new)
    else:
        while len(sink) > what:
            sink.pop()
        sink.extend(new)


def _walk(value: Any, path: Path, depth: int, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if has_fields(value) and type(value) not in (UserDict, UserList):
        value = vars(value)
    if type(value) in (*_LISTS, *_DICTS, set):
        yield path, value
    if depth and isinstance(value, (tuple, *_LISTS)):
        inside: Any = enumerate(value)
    elif depth and isinstance(value, _DICTS):
        inside = list(value.items())
    else:
        return
    for key, each in inside:
        yield from _walk(each, (*path, key), depth - 1, seen)


def install_collectors(model: nn.Module, tree: nn.Module) -> Callable[[], None]:
    """Return a function that installs on the model the hooks that the run of `tree` has installed on its copies.

    Transformers' models install the hooks that collect outputs when they first need them, once for a model. A tree of
    copies shares its hooks with the model, so each tree would install them once more; without a request to collect,
    such hooks do nothing.
    """
    own = dict(model.named_modules())
    names = [name for name, twin in tree.named_modules() if vars(twin).get(_FLAG) and not vars(own[name]).get(_FLAG)]

    def install() -> None:
        capturing: Any = sys.modules.get("transformers.utils.output_capturing")
        for name in names:
            if capturing is not None:
                capturing.maybe_install_capturing_hooks(own[name])

    return install
