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

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.model.use_names import name_and_use

__all__ = ["find_units", "own_parameters"]

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_units(model: nn.Module, stages: int, split_at: tuple[str, ...] = ()) -> list[str]:
    """Names of the units, in the order of the module tree; at least `stages` of them if that can be."""
    names = dict(model.named_modules(remove_duplicate=False))
    found: list[str] = []
    _collect("", model, found, in_list=False)
    _untangle(found, names)
    for place in split_at:
        _open_for(found, names, name_and_use(place)[0])
        _untangle(found, names)
    while len(found) < stages:
        openable = [name for name in found if _openable(names[name])]
        if not found:
            raise ModelError(f"{type(model).__name__} has no parameters; there is nothing to cut into stages")
        if not openable:
            raise ModelError(
                f"{type(model).__name__} has {len(found)} units that own parameters ({', '.join(found[:8])}"
                f"{', ...' if len(found) > 8 else ''}), too few for {stages} stages; pass stages={len(found)} or fewer"
            )
        largest = max(openable, key=lambda name: _size(names[name]))
        _open(found, names, largest)
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
            _collect(_join(name, child_name), child, found, in_list=True)
    elif _has_trunk(module):
        for child_name, child in module.named_children():
            _collect(_join(name, child_name), child, found, in_list=False)
    else:
        found.append(name)


def _open_for(found: list[str], names: dict[str, nn.Module], wanted: str) -> None:
    """Open units until `wanted`, which lies inside one of them, is a unit itself."""
    while wanted not in found:
        around = [name for name in found if wanted.startswith(f"{name}.") or name == ""]
        if not around or not _openable(names[around[0]]):
            return
        _open(found, names, around[0])


def _open(found: list[str], names: dict[str, nn.Module], name: str) -> None:
    children = [_join(name, child_name) for child_name, _ in names[name].named_children()]
    place = found.index(name)
    found[place : place + 1] = [child for child in children if _owns_parameters(names[child])]
    for child in children:
        if child in found and isinstance(names[child], (nn.ModuleList, nn.ModuleDict)):  # nobody calls these
            _open(found, names, child)


def _openable(module: nn.Module) -> bool:
    """Its parameters all lie in children, so that its own forward can be glue."""
    return _count(module) >= 1 and not own_parameters(module) and not isinstance(module, torch.jit.ScriptModule)


def own_parameters(module: nn.Module) -> list[str]:
    """Names of the parameters that hang on the module itself and not on a child."""
    return [name for name, _ in module.named_parameters(recurse=False)]


def _has_trunk(module: nn.Module) -> bool:
    return any(isinstance(part, LISTS) and _count(part) >= 2 for part in module.modules())


def _count(module: nn.Module) -> int:
    return sum(_owns_parameters(child) for child in module.children())


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child
