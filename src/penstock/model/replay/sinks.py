"""Lists and dicts that a unit adds to beside returning something.

Hooks that collect hidden states, attention maps or a router's logits append to a list that a context variable holds;
other models hand a list from block to block. What a call has added there is one more output of it: where the unit does
not run, the same is added of what was received. Sinks are looked for in the call's arguments and in context variables.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__ = ["Sinks", "install_collectors"]

Path = tuple[Any, ...]
_FLAG = "_output_capturing_hooks_installed"
_DEEP = 4


class Sinks:
    """The lists and dicts that a call can reach, and how they were before it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._found: dict[Path, Any] = {}
        for place, value in [*enumerate(args), *kwargs.items()]:
            self._found.update(_walk(value, (place,), _DEEP))
        for variable, value in contextvars.copy_context().items():
            self._found.update(_walk(value, (None, variable.name), _DEEP))
        self._before: dict[Path, Any] = {
            path: set(sink) if isinstance(sink, dict) else len(sink) for path, sink in self._found.items()
        }

    def added(self) -> dict[Path, Any]:
        """What was added since, by where."""
        found: dict[Path, Any] = {}
        for path, sink in self._found.items():
            before = self._before[path]
            new = {key: sink[key] for key in sink if key not in before} if isinstance(sink, dict) else sink[before:]
            if new:
                found[path] = new
        return found

    def put(self, added: dict[Path, Any]) -> bool:
        """Let that be what was added; False if there is no such place."""
        for path, new in added.items():
            sink = self._found.get(path)
            if isinstance(sink, dict) and isinstance(new, dict):
                sink.update(new)
            elif isinstance(sink, list) and isinstance(new, list):
                sink[self._before[path] :] = new
            else:
                return False
        return True

    def run(self, function: Callable[[], Any]) -> tuple[Any, dict[Path, Any]]:
        """What a function returns and adds; the sinks are as before."""
        try:
            output = function()
            return output, self.added()
        finally:
            for path, sink in self._found.items():
                before = self._before[path]
                if isinstance(sink, dict):
                    for key in [key for key in sink if key not in before]:
                        del sink[key]
                else:
                    del sink[before:]


def _walk(value: Any, path: Path, depth: int) -> Iterator[tuple[Path, Any]]:
    if type(value) in (list, dict):
        yield path, value
    if depth and isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            if isinstance(each, (list, tuple, dict)):
                yield from _walk(each, (*path, place), depth - 1)
    elif depth and isinstance(value, dict):
        for key, each in value.items():
            if isinstance(each, (list, tuple, dict)):
                yield from _walk(each, (*path, key), depth - 1)


def install_collectors(model: nn.Module, tree: nn.Module) -> Callable[[], None]:
    """Transformers' models install the hooks that collect when they first need them, once for a model.

    A tree of copies shares its hooks with the model, so each tree would install them once more. The answer is a
    function that installs on the model what the run of `tree` has installed on its copies; without a request to
    collect, such hooks do nothing.
    """
    own = dict(model.named_modules())
    names = [name for name, twin in tree.named_modules() if vars(twin).get(_FLAG) and not vars(own[name]).get(_FLAG)]

    def install() -> None:
        capturing: Any = sys.modules.get("transformers.utils.output_capturing")
        for name in names:
            if capturing is not None:
                capturing.maybe_install_capturing_hooks(own[name])

    return install
