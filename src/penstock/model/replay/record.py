"""One run of the model on an example, to see which unit call needs what.

Marks (see `marks`) are read at every unit call's arguments and at the final output. What the glue gets of a unit's
output are copies, so that a unit's return value can be told from everything else that it made.

It fails closed. A tensor that was made inside a unit and reaches the glue by another way than the unit's return value
(a loss stashed on a module, a cache that was appended to, an output that a hook collected) has no mark to follow: that
is a leak, and refused. So are units that change what is not theirs, and glue that changes buffers or draws random
numbers from elsewhere than torch, which every stage would do once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ModelError
from penstock.model.replay.marks import Follower, Reads, fresh, tensors_in
from penstock.model.replay.tree import stage_tree
from penstock.model.replay.undo import Elsewhere, patched, undone

__all__ = ["PARAMETER", "Call", "Leaf", "Mark", "Recording", "patched", "record", "shapes_of", "tensors_in"]

Mark = tuple[int, int]  # (call, leaf of its output); or (PARAMETER, its number) for one that the glue reads
PARAMETER = -1


@dataclass(frozen=True)
class Leaf:
    """One tensor of a unit call's output, as far as a stand-in needs to know it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass
class Call:
    """One call of a unit: which, what it needed, what it returned."""

    unit: str
    needs: frozenset[Mark]
    leaves: list[Any]  # Leaf for tensors, the value itself for the rest
    spec: Any
    given: Any = None  # what decided the shapes: those of its arguments, plain values, the mode
    seconds: float = 0.0
    glue: bool = False  # a parameter-free module that no unit's value reaches: every stage runs it
    changed_in_place: bool = False  # the glue writes into what it returned


def shapes_of(value: Any, training: bool = True) -> tuple[Any, ...]:
    """What decides the shapes of a call's results: those of its arguments, plain values, the module's mode."""
    plain = tuple(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (int, float, str)) or leaf is None)
    tensors = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(value))
    return (tensors, plain, training)


@dataclass
class Recording:
    """All unit calls in order, and what the final output needs."""

    calls: list[Call] = field(default_factory=list)
    output: frozenset[Mark] = frozenset()
    parameters: list[str] = field(default_factory=list)  # what (PARAMETER, number) stands for
    draws_in_glue: bool = False
    reads_values: bool = False  # the glue turned a tensor into a Python value
    writes_inputs: bool = False  # the glue changes the model's inputs in place


class _Marks(Follower):  # type: ignore[no-untyped-call]
    """Follows marks through every operation outside of units, and watches what units do."""

    def __init__(self, recording: Recording, model: nn.Module, inputs: list[Tensor]) -> None:
        super().__init__()
        self.recording = recording
        self.marks: dict[int, frozenset[Mark]] = {}
        self.control: frozenset[Mark] = frozenset()  # what decided the path so far
        self.inside: str | None = None
        self.quiet = False
        self.in_free = False  # a module without parameters runs
        self.made_inside: dict[int, str] = {}
        self.inputs = {self.storages.key(tensor) for tensor in inputs}
        self.buffers = {self.storages.key(buffer): name for name, buffer in model.named_buffers()}
        self._read: set[Mark] = set()  # by the unit that runs, beside its arguments
        self._may_write: set[int] = set()
        for name, parameter in model.named_parameters():
            self.marks[self.storages.key(parameter)] = frozenset({(PARAMETER, len(recording.parameters))})
            recording.parameters.append(name)

    def of(self, value: Any) -> frozenset[Mark]:
        """All marks on the tensors of a value; a leak is refused here."""
        found: set[Mark] = set(self.control)
        for tensor in tensors_in(value):
            key = self.storages.key(tensor)
            if key in self.made_inside:
                unit = self.made_inside[key]
                raise ModelError(
                    f"{unit} gives a tensor away other than by returning it (a cache, a list that it appends to, a "
                    f"loss or output kept on a module or collected by a hook); return it, or switch that off "
                    f"(use_cache=False, output_hidden_states=False), or let {unit} and its reader be one module"
                )
            found |= self.marks.get(key, frozenset())
        return frozenset(found)

    def read(self, tensors: list[Tensor]) -> None:
        """The glue has turned these into Python values."""
        if self.inside is None:
            self.recording.reads_values = True
            self.control |= self.of(tensors)

    def seen(self, func: Any, taken: list[Tensor], made: list[Tensor], written: list[Tensor]) -> None:
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
        """The glue writes to it; every stage will, for itself."""
        if key in self.buffers:
            raise ModelError(
                f"the code between the units changes the buffer {self.buffers[key]} in place, which every stage would "
                f"do once more; let the module that owns it change it in its own forward"
            )
        if key in self.inputs:
            self.recording.writes_inputs = True
        for call, _ in self.marks.get(key, frozenset()):
            if call != PARAMETER:
                self.recording.calls[call].changed_in_place = True

    def _in_unit(self, unit: str, taken: list[Tensor], made: list[Tensor], written: list[Tensor]) -> None:
        for tensor in taken:
            key = self.storages.key(tensor)
            if self.made_inside.get(key, unit) != unit:
                self.of(tensor)  # another unit's: a leak
            self._read |= self.marks.get(key, frozenset())
        for tensor in written:
            key = self.storages.key(tensor)
            if key not in self.made_inside and key not in self._may_write:
                raise ModelError(
                    f"{unit} changes a tensor of shape {tuple(tensor.shape)} in place that it was given or found; the "
                    f"change would not reach other stages. Let it return the new tensor instead"
                )
        known = set(map(self.storages.key, taken))
        for tensor in made:
            key = self.storages.key(tensor)
            if key not in known and key not in self.marks:
                self.made_inside.setdefault(key, unit)

    def enter(self, unit: str, module: nn.Module) -> None:
        self.inside = unit
        own = [*module.buffers(), *module.parameters()]
        self._read, self._may_write = set(), {self.storages.key(tensor) for tensor in own}

    def leave(self, module: nn.Module) -> frozenset[Mark]:
        """What the unit has read of others' beside its arguments."""
        own = {self.storages.key(parameter) for parameter in module.parameters()}
        mine = {mark for key in own for mark in self.marks.get(key, ())}
        self.inside = None
        return frozenset(self._read - mine)

    def note(self, call: Call, given: list[Tensor], output: Any) -> Any:
        """A unit has returned. Its output, as copies: from here on these carry its marks.

        What it only passed on (the same storage as an argument) keeps its old ones as well.
        """
        leaves, call.spec = pytree.tree_flatten(output)
        number = len(self.recording.calls)
        passed_on = set(map(self.storages.key, given))
        copies: dict[int, Tensor] = {}
        self.quiet = True
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                key = self.storages.key(leaf)
                before = self.marks.get(key, frozenset()) if key in passed_on else frozenset()
                copy = leaves[place] = copies.setdefault(id(leaf), fresh(leaf))
                twin = self.storages.key(copy)
                self.marks[twin] = self.marks.get(twin, frozenset()) | before | {(number, place)}
        self.quiet = False
        call.leaves = [
            Leaf(tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        self.recording.calls.append(call)
        return pytree.tree_unflatten(leaves, call.spec)


def record(
    model: nn.Module,
    units: list[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    instead: Callable[[str], Callable[..., Any]] | None = None,
) -> Recording:
    """Run the model once, as it is, and put everything back that the run has changed.

    `instead(unit)` may give a forward to run in the place of a unit's own: one that only finds out
    shapes, for models that are not in memory.
    """
    recording = Recording()
    modules = dict(model.named_modules())
    free = set(_free_leaves(model, units))
    with undone(model), torch.no_grad():
        args, kwargs = pytree.tree_map_only(Tensor, fresh, (args, kwargs))
        marks = _Marks(recording, model, tensors_in((args, kwargs)))
        elsewhere = Elsewhere()

        def answer(name: str, own: Callable[..., Any], args: Any, kwargs: Any, by_call: bool) -> Any:
            if marks.inside is not None or marks.in_free:
                return own(*args, **kwargs)
            elsewhere.check()
            if name in free:
                return _watch_free(name, modules[name], own, marks, args, kwargs)
            output = _watch(name, modules[name], own if instead is None else instead(name), marks, args, kwargs)
            elsewhere.rest()
            return output

        tree = stage_tree(model, {*units, *free}, answer, apart=False)
        with Reads(marks.read), marks:
            output = tree(*args, **kwargs)
        elsewhere.check()
        recording.output = marks.of(output)
    return recording


def _free_leaves(model: nn.Module, units: list[str]) -> list[str]:
    """Modules without parameters and children outside of units: activations, dropout, pooling."""
    inside = tuple(f"{unit}." for unit in units)
    return [
        name
        for name, module in model.named_modules()
        if name
        and name not in units
        and not name.startswith(inside)
        and next(module.children(), None) is None
        and next(module.parameters(), None) is None
        and type(module).forward is not nn.Module.forward
        and not isinstance(module, nn.Identity)
    ]


def _watch(name: str, module: nn.Module, own: Callable[..., Any], marks: _Marks, args: Any, kwargs: Any) -> Any:
    """A unit's run, noted as a call."""
    needs = marks.of((args, kwargs))
    given = tensors_in((args, kwargs))
    call = Call(name, needs, [], None, shapes_of((args, kwargs), module.training))
    marks.enter(name, module)
    begin = perf_counter()
    try:
        output = own(*args, **kwargs)
    finally:
        call.needs |= marks.leave(module)
    call.seconds = perf_counter() - begin
    return marks.note(call, given, output)


def _watch_free(name: str, module: nn.Module, own: Callable[..., Any], marks: _Marks, args: Any, kwargs: Any) -> Any:
    """A parameter-free module: a call if its output depends on units' values or it has a state of its own, else glue.

    Rotary tables, which read no more than the type of what they are given, are so computed by
    every stage for itself, while an activation or a dropout runs where its input is. One that
    works in place is glue like any other in-place operation.
    """
    needs = marks.of((args, kwargs))
    given = tensors_in((args, kwargs))
    versions = [tensor._version for tensor in given]
    buffers = [(buffer, buffer._version) for buffer in module.buffers()]
    before, known = marks.recording.draws_in_glue, dict(marks.buffers)
    for buffer, _ in buffers:
        marks.buffers.pop(marks.storages.key(buffer), None)
    marks.in_free = True
    output = own(*args, **kwargs)
    marks.buffers, marks.in_free = known, False
    unchanged = all(tensor._version == version for tensor, version in zip(given, versions, strict=True))
    has_state = any(buffer._version != version for buffer, version in buffers)
    if unchanged and (has_state or marks.of(output) - marks.control):
        marks.recording.draws_in_glue = before
        return marks.note(Call(name, needs, [], None, shapes_of((args, kwargs), module.training)), given, output)
    if has_state:
        raise ModelError(f"{name} changes its input in place and has buffers that it updates; pass inplace=False to it")
    marks.recording.calls.append(Call(name, frozenset(), [], None, glue=True))
    return output
