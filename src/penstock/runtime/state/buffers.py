"""The buffers of a stage whose forward runs a second time.

A recomputed forward must neither count twice nor read what later microbatches have written: it runs
on copies of the buffers as they were when the microbatch first went forward. (Copies, and not a
restore afterwards: the graph may have saved a buffer, and writing to it would make the backward
impossible.) Most buffers never change, so one copy serves all microbatches for as long as a
buffer's version stands still; and a large one that the first forward left alone, such as a mask, is
not copied at all but has to stay as it is. Versions alone don't tell: batch norm writes its
statistics past them, so that the first forward is also compared by value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.runtime.state.attribute_changes import exchanged
from penstock.runtime.state.memory import copy_like
from penstock.runtime.state.ownership import version_of

SMALL_BYTES = 64 * 1024  # up to here a copy is kept, whether or not the buffer is known to change


class Then(NamedTuple):
    """A buffer as it was: its version, and a copy where one was made."""

    buffer: Tensor
    version: int
    copy: Tensor | None


Key = tuple[int, str]  # where a buffer is: the table that holds it, and its name there


class Buffers:
    """All buffers of a stage."""

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        self._module = module
        self._moving: set[Key] | None = None  # the first forward changed them; None: it is yet to come
        self._kept: dict[Key, Then] = {}

    def _all(self) -> Iterator[tuple[Key, nn.Module, Tensor]]:
        own = getattr(self._module, "own_modules", self._module.modules)
        tables = {id(holder._buffers): holder for holder in own()}  # copies of modules share one
        for number, holder in tables.items():
            for name, buffer in holder._buffers.items():
                if buffer is not None:
                    yield (number, name), holder, buffer

    def before(self) -> dict[Key, Then]:
        """Ahead of a forward that will run again: what the buffers are."""
        return {key: self._then(key, buffer) for key, _, buffer in self._all()}

    def _then(self, key: Key, buffer: Tensor) -> Then:
        version, kept = version_of(buffer), self._kept.get(key)
        moves = self._moving is None or key in self._moving
        if not moves and kept is not None and kept.buffer is buffer and kept.version == version:
            return kept
        wanted = moves or buffer.numel() * buffer.element_size() <= SMALL_BYTES
        then = Then(buffer, version, copy_like(buffer.detach()) if wanted else None)
        if not moves:
            self._kept[key] = then
        return then

    def after(self, was: dict[Key, Then]) -> None:
        """Behind it: the first time, which of them it changed."""
        if self._moving is None:
            self._moving = {key for key, _, buffer in self._all() if key not in was or _differs(buffer, was[key])}

    def as_they_were(self, was: dict[Key, Then]) -> AbstractContextManager[None]:
        """A context in which the stage has copies of its buffers of that time."""
        exchange = []
        for key, holder, buffer in self._all():
            then = was.get(key)
            if then is None:  # made since, by the forward itself
                exchange.append((holder._buffers, key[1], buffer, copy_like(buffer.detach())))
                continue
            if then.copy is None and version_of(then.buffer) != then.version:
                raise RunError(
                    f"stage {self._stage}: buffer {key[1]} of {type(holder).__name__} has changed between the forward "
                    f"of a microbatch and its recomputation, and not in the stage's first forward, so no copy was "
                    f"kept; use recompute='never'"
                )
            old = then.buffer if then.copy is None else then.copy
            exchange.append((holder._buffers, key[1], buffer, copy_like(old.detach())))
        return exchanged(exchange)


def _differs(buffer: Tensor, then: Then) -> bool:
    if then.buffer is not buffer or version_of(buffer) != then.version or then.copy is None:
        return True
    return not torch.equal(buffer, then.copy)  # a nan counts as changed: one copy too many does no harm
