"""What a forward that runs a second time sees: the buffers and plain attributes of its stage as they were.

A recomputed forward must neither count twice nor read what later microbatches have written. So the stage's state is
looked at before and after a forward that will run again, and exchanged around the recomputation for what it was:

    a buffer       always for a copy of what it was. (Copies, and not a restore afterwards: the graph may have saved a
                   buffer, and writing to it would make the backward impossible.)
    an attribute   where a forward has changed it. What anything but a forward sets in between, such as weights that
                   were gathered, is not undone. Numbers, text and objects go by identity; lists, dicts, sets, deques
                   and tensors also change in place, and are copied.

Most state never changes, so one snapshot serves all microbatches for as long as versions stand still; and a large
tensor that the first forward left alone, such as a mask, is not copied at all, but has to stay as it is. Versions are
not enough: batch norm writes its statistics past them, so a first forward is also compared by value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.runtime.state.attribute_snapshots import (
    ABSENT,
    AttributeSnapshots,
    ContainerSnapshot,
    GeneratorSnapshot,
    Key,
    ModuleSnapshot,
    Restorable,
    is_trained,
)
from penstock.runtime.state.memory_layout import copy_like
from penstock.runtime.state.ownership import version_of

SMALL_BYTES = 64 * 1024  # up to here a copy is kept, whether or not the tensor is known to change


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


class StateBefore(NamedTuple):
    """The state of a stage before a forward."""

    buffers: Mapping[Key, _TensorSnapshot]  # by the table that holds each, and its name there
    attributes: Mapping[int, ModuleSnapshot]  # by table


class RecomputedState(AttributeSnapshots):
    """The buffers of a stage, and all plain attributes of its modules."""

    def __init__(self, stage: int, module: nn.Module) -> None:
        super().__init__()
        self._stage = stage
        self._module = module
        self._changing: set[Key] | None = None  # buffers that the first forward changed; None: it is yet to come
        self._kept: dict[Key, _TensorSnapshot] = {}  # of buffers that do not change
        self._moving: dict[Key, dict[str, Any]] = {}  # the tables of those attributes that forwards change
        self._written: dict[
            Key, bool
        ] = {}  # whether a tensor there is written to in place, once a forward has shown it
        self._unproven: list[tuple[Key, _TensorSnapshot]] = []
        self._copying = True
        self.in_use = False  # whether any forward of this stage is watched: where nothing is recomputed, none is

    def _buffers(self) -> Iterator[tuple[Key, nn.Module, Tensor]]:
        own = getattr(self._module, "own_modules", self._module.modules)
        tables = {id(holder._buffers): holder for holder in own()}  # copies of modules share one
        for number, holder in tables.items():
            for name, buffer in holder._buffers.items():
                if buffer is not None:
                    yield (number, name), holder, buffer

    def before(self) -> StateBefore:
        """Look at the state ahead of a forward that will run again."""
        running = getattr(self._module, "running_modules", self._module.modules)
        self._unproven, self._copying, self.in_use = [], True, True
        tables = {id(vars(module)): vars(module) for module in running()}
        return StateBefore({key: self._look_at(key, buffer) for key, _, buffer in self._buffers()}, self.take(tables))

    def _look_at(self, key: Key, buffer: Tensor) -> _TensorSnapshot:
        changes, kept = self._changing is None or key in self._changing, self._kept.get(key)
        if not changes and kept is not None and kept.tensor is buffer and kept.version == version_of(buffer):
            return kept
        then = _TensorSnapshot(buffer, changes or _is_small(buffer))
        if not changes:
            self._kept[key] = then
        return then

    def after(self, was: StateBefore) -> None:
        """Look at it again, after that forward: what has it changed?"""
        if self._changing is None:
            now = {key: buffer for key, _, buffer in self._buffers()}
            same = {key for key, then in was.buffers.items() if now.get(key) is then.tensor and then.is_as_it_was()}
            self._changing = now.keys() - same
        for key, then in self._unproven:
            self._written[key] = self._written.get(key, False) or not then.is_as_it_was()
        for key, then in self._unproven:
            if not self._written[key] and not _is_small(then.tensor):
                then.copy = None
        self._unproven, self._copying = [], False
        attributes = self.take({number: module.table for number, module in was.attributes.items()})
        for number, module in was.attributes.items():
            if attributes[number] is not module:
                old, new = module.captured, attributes[number].captured
                for name in {*old, *new}:
                    if old.get(name, ABSENT) is not new.get(name, ABSENT):
                        self._moving[number, name] = module.table

    @contextmanager
    def as_it_was(self, was: StateBefore) -> Iterator[None]:
        """Let the stage's modules have the state of that time inside the `with` block."""
        made: dict[int, Any] = {}
        exchange: list[tuple[Any, str, Any, Any]] = []  # table, name, value now, value inside
        for key, holder, buffer in self._buffers():
            inside = self._copy_buffer(f"{key[1]} of {type(holder).__name__}", was.buffers.get(key), buffer)
            exchange.append((holder._buffers, key[1], buffer, inside))
        for (number, name), table in self._moving.items():
            if number in was.attributes:
                now, then = table.get(name, ABSENT), was.attributes[number].captured.get(name, ABSENT)
                exchange.append((table, name, now, self._recreate((number, name), then, made)))
        try:
            for table, name, _, inside in exchange:
                _put(table, name, inside)
            yield
        finally:
            for table, name, now, _ in exchange:
                _put(table, name, now)

    def _copy_buffer(self, name: str, then: _TensorSnapshot | None, buffer: Tensor) -> Tensor:
        """Return a copy of a buffer as it was; of one that the forward itself has made, as it is."""
        if then is None:
            return copy_like(buffer.detach())
        if then.copy is None and version_of(then.tensor) != then.version:
            raise RunError(
                f"stage {self._stage}: buffer {name} has changed between the forward of a microbatch and its "
                f"recomputation, and not in the stage's first forward, so no copy was kept; use recompute='never'"
            )
        return copy_like((then.tensor if then.copy is None else then.copy).detach())

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


def _put(table: Any, name: str, value: Any) -> None:
    if value is ABSENT:
        table.pop(name, None)
    else:
        table[name] = value


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= SMALL_BYTES
