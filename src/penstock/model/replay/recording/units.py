"""Which submodules of a model are its units: the smallest pieces that are never taken apart.

Units together own every parameter. They should be whole blocks of the trunk: with finer ones
the residual additions between them would multiply what crosses a cut. So a container that
holds a list of blocks is opened, and each block of the outermost list is a unit. Everything
else of the model, the parameter-free Python code between unit calls, is *glue*, which every
stage runs for itself.

Where a container that must be opened owns a parameter itself (a logit scale, a class token
beside the trunk), that parameter belongs to the glue: each stage that reads it has it.

A module may hang in the tree at several places (`self.last = self.layers[-1]`). It is one unit, under its first name,
and never inside of another: what has it inside is opened too, so that all its calls are known to be of one unit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.model.use_names import dotted_name, name_and_use

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_units(model: nn.Module, split_at: Sequence[str] = ()) -> list[str]:
    """Names of the units, in the order of the module tree, where those that `split_at` names are units."""
    names = dict(model.named_modules(remove_duplicate=False))
    found: list[str] = []
    _collect("", model, found, in_list=False)
    _untangle(found, names)
    for place in split_at:
        _open_for(found, names, name_and_use(place)[0])
        _untangle(found, names)
    if not found:
        raise ModelError(f"{type(model).__name__} has no parameters; there is nothing to cut into stages")
    return found


def smaller_units(model: nn.Module, units: Sequence[str]) -> list[str] | None:
    """The units with the largest of them opened; None where none can be.

    There need not be more of them: a model whose one block is called many times has one unit, and many calls.
    """
    names = dict(model.named_modules(remove_duplicate=False))
    openable = [name for name in units if _openable(names[name])]
    if not openable:
        return None
    found = list(units)
    _open(found, names, max(openable, key=lambda name: _size(names[name])))
    _untangle(found, names)
    return found


def _untangle(found: list[str], names: dict[str, nn.Module]) -> None:
    """Every module once, by its first name, and none inside of another."""
    first: dict[int, str] = {}
    for name, module in names.items():
        first.setdefault(id(module), name)
    while True:
        found[:] = dict.fromkeys(first[id(names[name])] for name in found)
        units = {id(names[name]): name for name in found}
        outer, inner = next(
            (
                (name, units[id(part)])
                for name in found
                for part in names[name].modules()
                if units.get(id(part), name) != name
            ),
            ("", ""),
        )
        if not inner:
            return
        if not _openable(names[outer]):
            raise ModelError(
                f"{inner} is a part of {outer}, which has parameters of its own and cannot be taken apart, and is used "
                f"elsewhere too; put these parameters into a module of their own"
            )
        _open(found, names, outer)


def _collect(name: str, module: nn.Module, found: list[str], *, in_list: bool) -> None:
    if not _owns_parameters(module):
        return
    if in_list or isinstance(module, torch.jit.ScriptModule):
        found.append(name)
        return
    if isinstance(module, LISTS) and _count(module) >= 2:
        for child_name, child in module.named_children():
            _collect(dotted_name(name, child_name), child, found, in_list=True)
    elif any(isinstance(part, LISTS) and _count(part) >= 2 for part in module.modules()):  # it has a trunk
        for child_name, child in module.named_children():
            _collect(dotted_name(name, child_name), child, found, in_list=False)
    else:
        found.append(name)


def _open_for(found: list[str], names: dict[str, nn.Module], unit: str) -> None:
    """Open units until `unit`, which lies inside one of them, is a unit itself."""
    while unit not in found:
        around = [name for name in found if unit.startswith(f"{name}.") or name == ""]
        if not around or not _openable(names[around[0]]):
            return
        _open(found, names, around[0])


def _open(found: list[str], names: dict[str, nn.Module], name: str) -> None:
    children = [dotted_name(name, child_name) for child_name, _ in names[name].named_children()]
    place = found.index(name)
    found[place : place + 1] = [child for child in children if _owns_parameters(names[child])]
    for child in children:
        if child in found and isinstance(names[child], (nn.ModuleList, nn.ModuleDict)):  # nobody calls these
            _open(found, names, child)


def _openable(module: nn.Module) -> bool:
    """Whether all parameters of a module lie in children, so that its own forward can be glue."""
    own = next(module.parameters(recurse=False), None)
    return _count(module) >= 1 and own is None and not isinstance(module, torch.jit.ScriptModule)


def _count(module: nn.Module) -> int:
    return sum(_owns_parameters(child) for child in module.children())


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
