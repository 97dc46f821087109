"""Which submodules of a model are its units: the smallest pieces that are never taken apart.

Units together own every parameter. They should be whole blocks of the trunk: with finer ones
the residual additions between them would multiply what crosses a cut. So a container that
holds a list of blocks is opened, and each block of the outermost list is a unit. A module
without a forward (a `ModuleList`, a `ModuleDict`, a class that only groups layers) is never one:
nobody calls it, so all it holds would be the glue's. Everything else of the model, the
parameter-free Python code between unit calls, is *glue*, which every stage runs for itself.

Some units turn out to be too large when it is known how many stages there are, or to be opened
by the model itself, which calls what is inside of them: those are opened after a recording.

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
from penstock.model.names import dotted_name, name_and_use
from penstock.model.replay.recording.unit_calls import ForwardRecording

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
    """Return the units with the largest of them opened; None where none can be.

    There need not be more of them: a model whose one block is called many times has one unit, and many calls.
    """
    names = dict(model.named_modules(remove_duplicate=False))
    openable = [name for name in units if _openable(names[name])]
    return _opened(names, units, [max(openable, key=lambda name: _size(names[name]))]) if openable else None


def entered_units(model: nn.Module, units: Sequence[str], recording: ForwardRecording) -> list[str] | None:
    """Return the units with those opened that the model calls only from inside; None where there is none.

    `self.backbone.layer1(x)` runs a part of a unit and never the unit: its parameters would be read by the glue, and
    each stage that reads one would hold it.
    """
    names = dict(model.named_modules(remove_duplicate=False))
    called = {call.unit for call in recording.calls}
    read = {id(value) for name, value in model.named_parameters() if name in set(recording.parameters)}
    entered = [
        name
        for name in units
        if name not in called
        and not isinstance(names[name], torch.jit.ScriptModule)
        and any(id(value) in read for child in names[name].children() for value in child.parameters())
    ]
    return _opened(names, units, entered) if entered else None


def units_of_a_fair_size(model: nn.Module, units: Sequence[str], stages: int) -> list[str] | None:
    """Return the units with those opened that no even cut has room for; None where there is none.

    A unit is opened if it is larger than a stage should be, and a list of blocks of one kind is inside of
    it: the stages of a vision transformer, an encoder beside a decoder. One layer, however large, stays as it is.
    """
    names = dict(model.named_modules(remove_duplicate=False))
    fair = _size(model) / stages
    large = [
        name
        for name in units
        if _size(names[name]) > fair and _openable(names[name]) and any(map(_is_trunk, names[name].modules()))
    ]
    return _opened(names, units, large) if large else None


def _opened(names: dict[str, nn.Module], units: Sequence[str], which: Sequence[str]) -> list[str]:
    found = list(units)
    for name in which:
        _open(found, names, name)
    _untangle(found, names)
    return found


def _untangle(found: list[str], names: dict[str, nn.Module]) -> None:
    """Name every module once, by its first name, and none inside of another."""
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
    if not has_forward(module):
        blocks = in_list or isinstance(module, nn.ModuleList) or _is_trunk(module)
        for child_name, child in module.named_children():
            _collect(dotted_name(name, child_name), child, found, in_list=blocks)
    elif in_list or isinstance(module, torch.jit.ScriptModule):
        found.append(name)
    elif isinstance(module, LISTS) and _count(module) >= 2:
        for child_name, child in module.named_children():
            _collect(dotted_name(name, child_name), child, found, in_list=True)
    elif any(isinstance(part, LISTS) and _count(part) >= 2 for part in module.modules()):  # The module has a trunk.
        for child_name, child in module.named_children():
            _collect(dotted_name(name, child_name), child, found, in_list=False)
    else:
        found.append(name)


def _open_for(found: list[str], names: dict[str, nn.Module], unit: str) -> None:
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
        if child in found and not has_forward(names[child]):
            _open(found, names, child)


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called, and does not only hold others."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return getattr(module.forward, "__func__", module.forward) is not nn.Module.forward


def _is_trunk(module: nn.Module) -> bool:
    """Return whether a container holds blocks, and not layers, of one kind."""
    blocks = [child for child in module.children() if _owns_parameters(child)]
    return (
        isinstance(module, LISTS)
        and len(blocks) >= 2
        and len({type(block) for block in blocks}) == 1
        and all(_count(block) for block in blocks)
    )


def _openable(module: nn.Module) -> bool:
    """Return whether all parameters of a module lie in children, so that its own forward can be glue."""
    own = next(module.parameters(recurse=False), None)
    return _count(module) >= 1 and own is None and not isinstance(module, torch.jit.ScriptModule)


def _count(module: nn.Module) -> int:
    return sum(_owns_parameters(child) for child in module.children())


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
