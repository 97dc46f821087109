"""Marks on what units return, followed through the glue, and an eye on what units and glue must not do.

See `example_run` for the run in which this happens, and for what is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model.original.settings import OWN
from penstock.model.replay.recording.marks import Follower, fresh
from penstock.model.replay.recording.unit_calls import (
    PARAMETER,
    ForwardRecording,
    Leaf,
    Mark,
    UnitCall,
    flatten,
    tensors_in,
    unflatten,
)


class UnitMarks(Follower):  # type: ignore[no-untyped-call]
    """Follows marks through every operation outside of units, and watches what units do."""

    def __init__(
        self,
        recording: ForwardRecording,
        model: nn.Module,
        inputs: list[Tensor],
        kept: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        super().__init__()
        self.recording = recording
        self.marks: dict[int, frozenset[Mark]] = {}
        self.control: frozenset[Mark] = frozenset()  # what decided the path so far
        self.inside: str | None = None
        self.quiet = False
        self.free: str | None = None  # the module without parameters that runs
        self.made_inside: dict[int, str] = {}
        self.inputs = {self.storages.key(tensor) for tensor in inputs}
        self.buffers = {self.storages.key(tensor): name for name, tensor in kept}
        self.buffers.update({self.storages.key(buffer): f"the buffer {name}" for name, buffer in model.named_buffers()})
        self.left: dict[int, str] = {}  # An earlier run has left these, made of units' values.
        self._shared: dict[int, tuple[str, set[int]]] = {}  # storages that a unit made one, and in the stages are not
        self._behind: dict[int, str] = {}  # Those of them whose twin was written to.
        self._read: set[Mark] = set()  # The unit that runs has read these beside its arguments.
        self._may_write: set[int] = set()
        self.written_by: dict[int, set[str]] = {}  # storages, by which units
        self._parameters = {id(parameter) for parameter in model.parameters()}
        saved = model.state_dict(keep_vars=True)
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
        for name, tensor in [*model.named_parameters(), *buffers]:
            self.put(tensor, (PARAMETER, len(recording.parameters)))
            recording.parameters.append(name)

    def put(self, tensor: Tensor, mark: Mark) -> None:
        key = self.storages.key(tensor)
        self.marks[key] = self.marks.get(key, frozenset()) | {mark}

    def of(self, value: Any) -> frozenset[Mark]:
        """Return all marks on the tensors of a value; a leak is refused here."""
        found: set[Mark] = set(self.control)
        for tensor in tensors_in(value):
            key = self.storages.key(tensor)
            if key in self._behind:
                raise ModelError(
                    f"{self._behind[key]} returns tensors that share memory with each other or with its argument; one "
                    f"was changed in place and another is read, which on other stages do not share it. Return a "
                    f"clone(), or leave out the in-place operation"
                )
            if key in self.left:
                raise ModelError(
                    f"the code between the units keeps {self.left[key]}, made of units' values, from one call of the "
                    f"model to the next; stages without these values could not. Keep it in a module that is a unit"
                )
            if key in self.made_inside:
                unit = self.made_inside[key]
                raise ModelError(
                    f"{unit} gives a tensor away other than by returning it (a cache, a list that it appends to, a "
                    f"loss or output kept on a module or collected by a hook); return it, or switch that off "
                    f"(use_cache=False, output_hidden_states=False), or let {unit} and its reader be one module"
                )
            found |= self.marks.get(key, frozenset())
        return frozenset(found)

    def is_of_units(self, tensor: Tensor) -> bool:
        """Return whether a tensor was made of what units returned, or inside of one."""
        key = self.storages.key(tensor)
        return key in self.made_inside or any(call >= 0 for call, _ in self.marks.get(key, ()))

    def is_made_inside(self, tensor: Tensor) -> bool:
        """Return whether a unit made it and did not return it."""
        return self.storages.key(tensor) in self.made_inside

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Follow nothing of what is done inside: it is not the model's doing."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    def read(self, tensors: list[Tensor]) -> None:
        """Note that the glue has turned these into Python values."""
        if self.inside is None and not self.quiet:
            self.recording.reads_values = True
            self.control |= self.of(tensors)

    def on_operation(self, func: Any, taken: list[Tensor], made: list[Tensor], written: list[Tensor]) -> None:
        if self.quiet:
            return
        if self.inside is not None:
            self._in_unit(self.inside, taken, made, written)
            return
        marks = self.of(taken)
        if self.reads_values(func):
            self.read(taken)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.recording.draws_in_glue = True
        for tensor in [*made, *written]:
            key = self.storages.key(tensor)
            self.marks[key] = self.marks.get(key, frozenset()) | marks
        for tensor in written:
            self._changed(self.storages.key(tensor))

    def _changed(self, key: int) -> None:
        """Note that the glue writes to it; every stage will, for itself."""
        if key in self.buffers:
            raise ModelError(
                f"the code between the units changes {self.buffers[key]} in place, which every stage would "
                f"do once more; let the module that owns it change it in its own forward"
            )
        if key in self._shared:
            unit, others = self._shared[key]
            self._behind.update(dict.fromkeys(others - {key}, unit))
        if key in self.inputs:
            self.recording.writes_inputs = True
        for call, _ in self.marks.get(key, frozenset()):
            if call >= 0:
                self.recording.calls[call].changed_in_place = True

    def _in_unit(self, unit: str, taken: list[Tensor], made: list[Tensor], written: list[Tensor]) -> None:
        for tensor in taken:
            key = self.storages.key(tensor)
            if self.made_inside.get(key, unit) != unit or key in self.left:
                self.of(tensor)  # another unit's: a leak
            self._read |= self.marks.get(key, frozenset())
        for tensor in written:
            key = self.storages.key(tensor)
            if key not in self.made_inside and key not in self._may_write:
                raise ModelError(
                    f"{unit} changes a tensor of shape {tuple(tensor.shape)} in place that it was given or found; the "
                    f"change would not reach other stages. Let it return the new tensor instead"
                )
            self.written_by.setdefault(key, set()).add(unit)
        known = set(map(self.storages.key, taken))
        for tensor in made:
            key = self.storages.key(tensor)
            if key not in known and key not in self.marks:
                self.made_inside.setdefault(key, unit)

    def check_parameters(self, unit: str, module: nn.Module) -> None:
        """Refuse a unit whose parameters the model's code has exchanged: all stages have one table of them."""
        if any(id(parameter) not in self._parameters for parameter in module.parameters()):
            raise ModelError(
                f"{unit} is called with other parameters than its own, as torch.func.functional_call does, which on "
                f"other stages would not be there; let what makes them and {unit} be one module, or pass them as "
                f"arguments"
            )

    def enter(self, unit: str, module: nn.Module) -> None:
        self.inside = unit
        own = [*module.buffers(), *module.parameters()]
        for inner in module.modules():
            own += tensors_in({name: value for name, value in vars(inner).items() if name not in OWN}, 1)
        self._read, self._may_write = set(), {self.storages.key(tensor) for tensor in own}

    def leave(self, module: nn.Module) -> frozenset[Mark]:
        """Return what the unit has read of others' beside its arguments."""
        own = {self.storages.key(tensor) for tensor in [*module.parameters(), *module.buffers()]}
        mine = {mark for key in own for mark in self.marks.get(key, ())}
        self.inside = None
        return frozenset(self._read - mine)

    def note(self, call: UnitCall, given: list[Tensor], output: Any) -> Any:
        """Note that a unit has returned; return its output as copies, which carry its marks from here on.

        What it only passed on (the same storage as an argument) keeps its old ones as well.
        """
        leaves, call.spec = flatten(output)
        number = len(self.recording.calls)
        passed_on = set(map(self.storages.key, given))
        copies: dict[int, Tensor] = {}
        same: dict[int, set[int]] = {}  # a storage in the unit -> those that stand for it from here on
        self.quiet = True
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                key = self.storages.key(leaf)
                before = self.marks.get(key, frozenset()) if key in passed_on else frozenset()
                copy = leaves[place] = copies.setdefault(id(leaf), fresh(leaf))
                twin = self.storages.key(copy)
                same.setdefault(key, {key} & passed_on).add(twin)
                self.marks[twin] = self.marks.get(twin, frozenset()) | before | {(number, place)}
        self.quiet = False
        for keys in same.values():
            if len(keys) > 1:
                group = set().union(keys, *(self._shared[key][1] for key in keys if key in self._shared))
                self._shared.update(dict.fromkeys(group, (call.unit, group)))
        call.leaves = [
            Leaf(tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        self.recording.calls.append(call)
        return unflatten(leaves, call.spec)
