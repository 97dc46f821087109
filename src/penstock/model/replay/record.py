"""One run of the model on an example, to see which unit call needs what.

Every tensor that a unit call returns is marked with (call, leaf). The marks travel through the
glue's operations, seen below autograd where nothing escapes (a dispatch mode sees scripted
functions and composite operations as well), and are read at every unit call's arguments and at
the final output. Marks hang on storages: a write through a view reaches all that share it, so
in-place glue can only add marks, never lose one.

It fails closed. A tensor that was made inside a unit and reaches the glue by another way than
the unit's return value (a loss stashed on a module, a cache that was appended to) has no
mark to follow: that is a leak, and refused, as is a unit that changes its arguments in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import ModelError

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
    given: Any = None  # the shapes of its arguments, for which `leaves` hold
    seconds: float = 0.0
    glue: bool = False  # a parameter-free module that no unit's value reaches: every stage runs it
    changed_in_place: bool = False  # the glue writes into what it returned


def shapes_of(value: Any) -> tuple[Any, ...]:
    """What decides the shapes of a call's results: those of its arguments."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(value))


@dataclass
class Recording:
    """All unit calls in order, and what the final output needs."""

    calls: list[Call] = field(default_factory=list)
    output: frozenset[Mark] = frozenset()
    parameters: list[str] = field(default_factory=list)  # what (PARAMETER, number) stands for
    draws_in_glue: bool = False
    reads_values: bool = False  # the glue turned a tensor into a Python value


def tensors_in(value: Any, depth: int = 3) -> list[Tensor]:
    """Every tensor in a pytree, and in the attributes of objects that are no pytrees."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)) and not callable(leaf):
            found += tensors_in(dict(vars(leaf)), depth - 1)
    return found


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Marks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows marks through every operation outside of units."""

    def __init__(self, recording: Recording, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording
        self.marks: dict[int, frozenset[Mark]] = {}
        self.control: frozenset[Mark] = frozenset()  # what decided the path so far
        self.inside: str | None = None
        self.made_inside: dict[int, str] = {}
        self._alive: list[Any] = []  # storages stay, so that no address is used twice
        for name, parameter in model.named_parameters():
            self.marks[self.keep(parameter)] = frozenset({(PARAMETER, len(recording.parameters))})
            recording.parameters.append(name)

    def keep(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        return int(storage._cdata)

    def of(self, value: Any) -> frozenset[Mark]:
        """All marks on the tensors of a value; a leak is refused here."""
        found: set[Mark] = set(self.control)
        for tensor in tensors_in(value):
            key = _key(tensor)
            if key in self.made_inside:
                unit = self.made_inside[key]
                raise ModelError(
                    f"{unit} gives a tensor away other than by returning it (a cache, a list that it appends to, a "
                    f"loss or output kept on a module); return it, or switch that off (use_cache=False, "
                    f"output_hidden_states=False), or cut the model so that {unit} and its reader are one unit"
                )
            found |= self.marks.get(key, frozenset())
        return frozenset(found)

    def note(self, unit: str, needs: frozenset[Mark], given: list[Tensor], output: Any, seconds: float) -> None:
        """A unit has returned: from here on its output carries its own marks.

        What it only passed on (the same storage as an argument) keeps its old ones as well.
        """
        leaves, spec = pytree.tree_flatten(output)
        call = len(self.recording.calls)
        passed_on = {_key(tensor) for tensor in given}
        own: dict[int, frozenset[Mark]] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                key = self.keep(leaf)
                self.made_inside.pop(key, None)
                before = self.marks.get(key, frozenset()) if key in passed_on else frozenset()
                own[key] = own.get(key, before) | {(call, place)}
        self.marks.update(own)
        known = [
            Leaf(tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        self.recording.calls.append(Call(unit, needs, known, spec, shapes_of(given), seconds))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.inside is not None:
            taken = {_key(tensor) for tensor in tensors_in((args, kwargs), 0)}
            for tensor in tensors_in(result, 0):
                key = self.keep(tensor)
                if key not in taken and key not in self.marks:
                    self.made_inside.setdefault(key, self.inside)
            return result
        self._glue(func, args, kwargs, result)
        return result

    def _glue(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        marks = self.of((args, kwargs))
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.recording.reads_values = True
            self.control |= marks
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.recording.draws_in_glue = True
        written = [] if not func._schema.is_mutable else _written(func, args, kwargs)
        for tensor in [*tensors_in(result, 0), *written]:
            key = self.keep(tensor)
            before = self.marks.get(key, frozenset())
            self.marks[key] = before | marks
        for tensor in written:
            for call, _ in self.marks.get(_key(tensor), frozenset()):
                if call != PARAMETER:
                    self.recording.calls[call].changed_in_place = True


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += tensors_in(value, 0)
    return found


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
    marks = _Marks(recording, model)
    free = set(_free_leaves(model, units))

    def wrap(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        if name in free:
            return _watch_free(name, forward, marks)
        return _watch(name, forward if instead is None else instead(name), marks)

    with _undone(model), patched(modules, [*units, *free], wrap), torch.no_grad():
        for tensor in [*tensors_in((args, kwargs)), *model.buffers()]:
            marks.keep(tensor)
        with marks:
            output = model(*args, **kwargs)
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


def _watch(name: str, forward: Callable[..., Any], marks: _Marks) -> Callable[..., Any]:
    """A unit's forward, noted as a call."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        if marks.inside is not None:
            return forward(*args, **kwargs)
        needs = marks.of((args, kwargs))
        given = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in given]
        marks.inside = name
        begin = perf_counter()
        try:
            output = forward(*args, **kwargs)
        finally:
            marks.inside = None
        seconds = perf_counter() - begin
        for tensor, version in zip(given, versions, strict=True):
            if tensor._version != version:
                raise ModelError(
                    f"{name} changes a tensor of shape {tuple(tensor.shape)} that it is given in place; the change "
                    f"would not reach other stages. Let it return the new tensor instead"
                )
        marks.note(name, needs, given, output, seconds)
        return output

    return watched


def _watch_free(name: str, forward: Callable[..., Any], marks: _Marks) -> Callable[..., Any]:
    """A parameter-free module: a call if its output depends on units' values, else glue.

    Rotary tables, which read no more than the type of what they are given, are so computed by
    every stage for itself, while an activation or a dropout runs where its input is. One that
    works in place is glue like any other in-place operation.
    """

    def watched(*args: Any, **kwargs: Any) -> Any:
        if marks.inside is not None:
            return forward(*args, **kwargs)
        needs = marks.of((args, kwargs))
        given = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in given]
        before = marks.recording.draws_in_glue
        output = forward(*args, **kwargs)
        unchanged = all(tensor._version == version for tensor, version in zip(given, versions, strict=True))
        if unchanged and marks.of(output) - marks.control:
            marks.recording.draws_in_glue = before
            marks.note(name, needs, given, output, 0.0)
        else:
            marks.recording.calls.append(Call(name, frozenset(), [], None, glue=True))
        return output

    return watched


@contextmanager
def patched(
    modules: dict[str, nn.Module], names: list[str], wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Units' forwards wrapped while the example runs; the user's model is as before afterwards."""
    before = {name: modules[name].__dict__.get("forward") for name in names}
    try:
        for name in names:
            modules[name].__dict__["forward"] = wrap(name, modules[name].forward)
        yield
    finally:
        for name in names:
            if before[name] is None:
                modules[name].__dict__.pop("forward", None)
            else:
                modules[name].__dict__["forward"] = before[name]


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """Buffers and the random generators as they were."""
    buffers = [(holder, name, value) for holder in model.modules() for name, value in holder._buffers.items()]
    state = torch.get_rng_state()
    for holder, name, value in buffers:
        holder._buffers[name] = None if value is None else value.detach().clone()
    try:
        yield
    finally:
        for holder, name, value in buffers:
            holder._buffers[name] = value
        torch.set_rng_state(state)
