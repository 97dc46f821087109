"""What is known of a model's run on its example: unit calls, what each needed, what it returned.

Values are taken apart into leaves: pytrees, and dataclasses, which torch does not take apart by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Structure:
    """Where the leaves stood; in the place of a dataclass, those of its fields."""

    spec: Any
    records: tuple[DataclassRecord, ...] = ()


@dataclass(frozen=True)
class DataclassRecord:
    """A dataclass among the leaves."""

    place: int
    kind: type
    names: tuple[str, ...]
    inside: Structure
    count: int  # Number of its leaves.


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of a value and how they were put together; the fields of a dataclass are leaves too."""
    outer, spec = pytree.tree_flatten(value)
    if not any(_is_record(leaf) for leaf in outer):
        return outer, Structure(spec)
    leaves: list[Any] = []
    records = []
    for place, leaf in enumerate(outer):
        if _is_record(leaf):
            known = dict.fromkeys([*(each.name for each in fields(leaf)), *getattr(leaf, "__dict__", ())])
            names = tuple(name for name in known if hasattr(leaf, name))
            found, structure = flatten([getattr(leaf, name) for name in names])
            records.append(DataclassRecord(place, type(leaf), names, structure, len(found)))
            leaves += found
        else:
            leaves.append(leaf)
    return leaves, Structure(spec, tuple(records))


def unflatten(leaves: list[Any], structure: Structure) -> Any:
    outer, place = [], 0
    records = {record.place: record for record in structure.records}
    for number in range(structure.spec.num_leaves):
        if number not in records:
            outer.append(leaves[place])
            place += 1
            continue
        record = records[number]
        made: Any = object.__new__(record.kind)
        values = unflatten(leaves[place : place + record.count], record.inside)
        for name, value in zip(record.names, values, strict=True):
            object.__setattr__(made, name, value)  # also where it is frozen
        outer.append(made)
        place += record.count
    return pytree.tree_unflatten(outer, structure.spec)


def _is_record(leaf: Any) -> bool:
    return is_dataclass(leaf) and not isinstance(leaf, (type, nn.Module))


def tensors_in(value: Any, depth: int = 3) -> list[Tensor]:
    """Return every tensor in a pytree, and in the attributes of objects that are no pytrees."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif depth and _is_record(leaf):
            found += tensors_in([getattr(leaf, each.name, None) for each in fields(leaf)], depth - 1)
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)) and not callable(leaf):
            found += tensors_in(dict(vars(leaf)), depth - 1)
    return found


def differ(value: Any, other: Any) -> bool:
    """Return whether two values that are no tensors differ, or may: what cannot be compared counts as different."""
    if value is other:
        return False
    if type(value) is not type(other):
        return True
    if "__eq__" in {name for base in type(value).__mro__[:-1] for name in vars(base)}:
        same = value == other
        return not (same if isinstance(same, bool) else bool(getattr(same, "all", bool)()))  # arrays: all of them
    if not hasattr(value, "__dict__") or callable(value):
        return True
    mine, theirs = vars(value), vars(other)
    return mine.keys() != theirs.keys() or any(differ(mine[name], theirs[name]) for name in mine)


Mark = tuple[int, int]  # (call, leaf of its output); or (PARAMETER, number), (STATE, number) for what the glue reads
PARAMETER, STATE = -1, -2


@dataclass(frozen=True)
class Leaf:
    """One tensor of a unit call's output, as far as a stand-in needs to know it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class KeptState:
    """An attribute that units change in their calls and others read."""

    name: str
    writers: frozenset[str]


@dataclass
class UnitCall:
    """One call of a unit: which, what it needed, what it returned."""

    unit: str
    needs: frozenset[Mark]
    leaves: list[Any]  # Leaf for tensors, the value itself for the rest
    spec: Any
    given: Any = None  # what decided the shapes: those of its arguments, plain values, the mode
    glue: bool = False  # a parameter-free module that no unit's value reaches: every stage runs it
    changed_in_place: bool = False  # the glue writes into what it returned
    adds: bool = False  # Adds to lists or dicts; (what it returns, what it adds) are its leaves.
    keeps: str = ""  # what it changes on itself at every call, such as running statistics


def _kind(leaf: Any) -> type:
    return torch.Tensor if isinstance(leaf, torch.Tensor) else type(leaf)  # one that a collective fills is one, too


def shapes_of(value: Any, mode: Any = True) -> tuple[Any, ...]:
    """Return what decides the shapes of a call's results: those of its arguments, plain values, where they stand, the
    mode.
    """
    leaves, structure = flatten(value)
    plain = tuple(leaf if leaf is None or isinstance(leaf, (int, float, str)) else _kind(leaf) for leaf in leaves)
    tensors = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(value))
    return (tensors, plain, structure, mode)


@dataclass(frozen=True)
class Untried:
    """Modules that were in eval mode in every run that was recorded, and why there was none with them in training."""

    modules: list[nn.Module]
    reason: str


@dataclass
class ForwardRecording:
    """All unit calls in order, and what the final output needs."""

    calls: list[UnitCall] = field(default_factory=list)
    output: frozenset[Mark] = frozenset()
    parameters: list[str] = field(default_factory=list)  # Also buffers: what (PARAMETER, number) stands for.
    states: list[KeptState] = field(default_factory=list)  # What (STATE, number) stands for.
    # By unit, what others read of it and must not change: (module inside of the unit, attribute).
    guarded: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    draws_in_glue: bool = False
    reads_values: bool = False  # the glue turned a tensor into a Python value
    writes_inputs: bool = False  # the glue changes the model's inputs in place
    # Checksums of what each unit call was given and returned; at the end, of the output.
    values: list[tuple[str, int, int]] = field(default_factory=list)
    untried: Untried | None = None  # None: the recording holds for training mode as well
