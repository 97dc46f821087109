"""The plain attributes of a stage whose forward runs a second time: counters, memories, caches.

As with buffers, a recomputed forward must see what the microbatch's first forward saw, and leave no trace. So each
module's attributes are looked at before and behind a forward that will run again; those that any forward has changed
are exchanged around the recomputation for what they were, and put back. Only those: what anything but a forward sets
in between, such as weights that were gathered, is not undone.

Numbers, text and objects go by identity. Lists, dicts, sets, deques and tensors also change in place: of these, copies
are made, and the recomputation gets a copy too, so that what others hold stays as it is. Where nothing has changed, a
snapshot costs a comparison of pointers, and all microbatches share what was captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.runtime.state.attribute_changes import (
    ABSENT,
    AttributeSnapshots,
    ContainerSnapshot,
    GeneratorSnapshot,
    Key,
    ModuleSnapshot,
    Restorable,
    exchanged,
    is_trained,
)
from penstock.runtime.state.buffers import SMALL_BYTES
from penstock.runtime.state.memory import copy_like
from penstock.runtime.state.ownership import version_of


class _TensorSnapshot(Restorable):
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


Snapshots = Mapping[int, ModuleSnapshot]  # by table


class Attributes(AttributeSnapshots):
    """All plain attributes of a stage's modules."""

    def __init__(self, stage: int, module: nn.Module) -> None:
        super().__init__()
        self._stage = stage
        self._module = module
        self._moving: dict[Key, dict[str, Any]] = {}  # the tables of those that forwards change
        self._written: dict[Key, bool] = {}  # whether the tensors there are written to in place, once a forward told
        self._unproven: list[tuple[Key, _TensorSnapshot]] = []
        self._copying = True
        self.in_use = False  # whether any forward of this stage is watched: where nothing is recomputed, none is

    def before(self) -> Snapshots:
        """Ahead of a forward that will run again: what the attributes are."""
        running = getattr(self._module, "running_modules", self._module.modules)
        self._unproven, self._copying, self.in_use = [], True, True
        tables = {id(vars(module)): vars(module) for module in running()}
        return self.take(tables)

    def after(self, was: Snapshots) -> None:
        """Behind it: which of them it changed."""
        for key, then in self._unproven:
            self._written[key] = self._written.get(key, False) or not then.is_as_it_was()
        for key, then in self._unproven:
            if not self._written[key] and not _is_small(then.tensor):
                then.copy = None
        self._unproven, self._copying = [], False
        now = self.take({number: module.table for number, module in was.items()})
        for number, module in was.items():
            if now[number] is not module:
                old, new = module.captured, now[number].captured
                for name in {*old, *new}:
                    if old.get(name, ABSENT) is not new.get(name, ABSENT):
                        self._moving[number, name] = module.table

    def as_they_were(self, was: Snapshots) -> AbstractContextManager[None]:
        """A context in which the stage's modules have the attributes of that time."""
        made: dict[int, Any] = {}
        exchange = []
        for key, table in self._moving.items():
            number, name = key
            if number in was:
                now, then = table.get(name, ABSENT), was[number].captured.get(name, ABSENT)
                exchange.append((table, name, now, self._recreate(key, then, made)))
        return exchanged(exchange)

    def _capture_tensor(self, key: Key, tensor: Tensor, before: Any) -> Any:
        if is_trained(tensor):
            return tensor
        known = isinstance(before, _TensorSnapshot) and before.tensor is tensor
        if known and before.version != version_of(tensor):
            self._written[key] = True
        written = self._written.get(key)
        copied = self._copying and (written is not False or _is_small(tensor))
        if known and not written and before.version == version_of(tensor) and (before.copy is not None or not copied):
            return before
        captured = _TensorSnapshot(tensor, copied)
        if written is None and self._copying:
            self._unproven.append((key, captured))
        return captured

    # -- what was there

    def _recreate(self, key: Key, captured: Any, made: dict[int, Any]) -> Any:
        """A value like the one that was seen; what two places shared, they share again."""
        if isinstance(captured, _TensorSnapshot):
            number = id(captured.tensor)
            if number not in made:
                made[number] = self._recreate_tensor(key, captured)
        elif isinstance(captured, ContainerSnapshot):
            number = id(captured.place)
            if number not in made:
                made[number] = captured.filled([self._recreate(key, one, made) for one in captured.captured])
        elif isinstance(captured, GeneratorSnapshot):
            number = id(captured.generator)
            if number not in made:
                made[number] = torch.Generator(device=captured.generator.device)
                made[number].set_state(captured.state)
        else:
            return captured
        return made[number]

    def _recreate_tensor(self, key: Key, captured: _TensorSnapshot) -> Tensor:
        if not self._written.get(key) and version_of(captured.tensor) == captured.version:
            return captured.tensor
        if captured.copy is None or captured.tensor.requires_grad:
            what = "and not in the first forward that had it, so no copy was kept"
            if captured.tensor.requires_grad:
                what = "and it belongs to the graph of an earlier forward"
            raise RunError(
                f"stage {self._stage}: a tensor in the attribute {key[1]} was written to between the forward of a "
                f"microbatch and its recomputation, {what}; use recompute='never', or make it a buffer"
            )
        return copy_like(captured.copy)


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= SMALL_BYTES
