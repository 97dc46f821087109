"""Tensors in what units take and return: pytrees, and dataclasses, which torch does not take apart by itself."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

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
