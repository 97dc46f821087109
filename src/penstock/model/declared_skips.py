"""Layers that hand a value to a layer further on, beside their output, and the way of these values between stages.

A layer of an `nn.Sequential` has one input and one output. A layer that is a `DeclaresSkips` says in addition what it
stashes for later layers and what it pops of earlier ones, each value by a key. Outside of a pipeline the values wait in
a table of the thread. In a pipeline that is cut by position they are ordinary edges of the topology: a stage's forward
starts with a table of what was sent to it, and what is left in the table afterwards goes straight to the stage that
pops it, whatever stages lie between the two. So values of several microbatches never meet, and forwards that run again
find the values that they had.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from penstock.errors import ModelError
from penstock.model.run_kind import DRY, run_kind

SkipKey = tuple[Any, str]  # what the name is unique in (None: the model), and the name
Routes = dict[tuple[int, int], tuple[SkipKey, ...]]  # (from stage, to stage) -> what travels
RunStage = Callable[[Mapping[int, Any], tuple[Any, ...], Mapping[str, Any]], dict[int, Any]]

_thread = threading.local()


class DeclaresSkips(nn.Module):
    """A layer that says what it stashes for later layers and pops of earlier ones."""

    def stashable(self) -> Iterable[SkipKey]:
        """Return the keys of the values that each forward puts into the table."""
        raise NotImplementedError

    def poppable(self) -> Iterable[SkipKey]:
        """Return the keys of the values that each forward takes out of the table."""
        raise NotImplementedError


def waiting_skips() -> dict[SkipKey, Any]:
    """Return the table of what was stashed and not popped yet, in the forward that this thread runs."""
    table: dict[SkipKey, Any] | None = getattr(_thread, "table", None)
    if table is None:
        table = _thread.table = {}
    return table


def take_skip(key: SkipKey) -> Any:
    """Pop a value; KeyError if it was not stashed. A layer that is measured runs several times, and leaves it there."""
    table = waiting_skips()
    return table[key] if run_kind() == DRY else table.pop(key)


@contextmanager
def use_skips(table: dict[SkipKey, Any]) -> Iterator[dict[SkipKey, Any]]:
    """Make layers stash to and pop from this table alone."""
    outer = getattr(_thread, "table", None)
    _thread.table = table
    try:
        yield table
    finally:
        _thread.table = outer


class SkipRoutes:
    """What one stage gets of declared skips, and from where, and what it sends, and to where.

    The values of one edge are a tuple in a fixed order. They travel beside what the edge carries anyway: a payload
    `(payload, values)`.
    """

    def __init__(self, stage: int, routes: Routes) -> None:
        self._stage = stage
        self._arriving = {source: keys for (source, target), keys in routes.items() if target == stage}
        self._leaving = {target: keys for (source, target), keys in routes.items() if source == stage}

    @classmethod
    def of(cls, stage: int, module: nn.Module, routes: Routes) -> SkipRoutes | None:
        return cls(stage, routes) if any(isinstance(layer, DeclaresSkips) for layer in module.modules()) else None

    def around(
        self, run: RunStage, arrived: Mapping[int, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[int, Any]:
        """Run the stage with the skips that have arrived, and send on those that it leaves."""
        table: dict[SkipKey, Any] = {}
        plain = dict(arrived)
        for source, keys in self._arriving.items():
            plain[source], values = arrived[source]
            table.update(zip(keys, values, strict=True))
        with use_skips(table):
            emitted = run(plain, args, kwargs)
        for target, keys in self._leaving.items():
            if missing := [name for space, name in keys if (space, name) not in table]:
                raise ModelError(
                    f"stage {self._stage} has not stashed {', '.join(map(repr, missing))}, which stage {target} pops; "
                    f"a layer has to stash in every forward what it declares"
                )
            emitted[target] = emitted.get(target), tuple(table[key] for key in keys)
        return emitted


def find_routes(modules: Sequence[nn.Module]) -> Routes:
    """Find which declared skips go from stage to stage, where these are the modules of the stages.

    Layers are looked for where the order of their calls is known: in `nn.Sequential`s, at any depth. What a layer of
    another kind has inside stashes and pops within that layer.
    """
    waiting: dict[SkipKey, int] = {}  # stashed and not popped yet, by what stage
    routes: dict[tuple[int, int], list[SkipKey]] = {}
    for stage, module in enumerate(modules):
        for layer in _declaring(module):
            for key in layer.poppable():
                if key not in waiting:
                    raise ModelError(
                        f"a {type(layer).__name__} on stage {stage} pops {key[1]!r}, which no layer before it stashes"
                    )
                source = waiting.pop(key)
                if source != stage:
                    routes.setdefault((source, stage), []).append(key)
            for key in layer.stashable():
                if key in waiting:
                    raise ModelError(
                        f"a {type(layer).__name__} on stage {stage} stashes {key[1]!r}, which was stashed before and "
                        f"is not popped yet; give each pair a name or a namespace of its own"
                    )
                waiting[key] = stage
    if waiting:
        names = ", ".join(repr(name) for _, name in waiting)
        raise ModelError(f"no layer pops {names}, which layers of the model stash; remove the stash, or add the layer")
    return {edge: tuple(keys) for edge, keys in sorted(routes.items())}


def _declaring(module: nn.Module) -> Iterator[DeclaresSkips]:
    if isinstance(module, DeclaresSkips):
        yield module
    elif type(module).forward is nn.Sequential.forward:
        for layer in module._modules.values():
            if layer is not None:
                yield from _declaring(layer)
