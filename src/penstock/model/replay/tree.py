"""Copies of a model's module tree: a stage's own, with its units' calls intercepted, and hollow ones for shapes.

Modules are copied one by one, shallowly, and never patched: the user's model must not change, and other stages may run
it on other threads at the same time. A unit's copy is of a class of its own, derived from the unit's, that asks
`answer` whenever it is called. The call as a whole is intercepted, not only `forward`: hooks, checkpointing and
compilation belong to the unit and happen where the unit is. Plain lists, dicts and sets that a container has as
attributes are copied too, so that what one stage's glue puts there is not seen by another's.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.names import dotted_name
from penstock.model.original.settings import OWN, AttributeChange, ModuleSettings

# (name, what runs the unit, args, kwargs, whether by a call and not by `forward`) -> output
Answer = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any], bool], Any]
_ABSENT = object()


def stage_tree(model: nn.Module, watched: set[str], answer: Answer, *, apart: bool = True) -> nn.Module:
    """Copy a model; `answer` is asked at every call of a watched module. `apart` copies plain lists and dicts too."""
    made: dict[int, Any] = {}
    root = _copy("", model, watched, answer, made)
    for twin in list(made.values()):
        if not getattr(type(twin), "is_asked", False):
            _redirect(twin, made, apart)
    return root


def hollow_copy(module: nn.Module, fill: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a module with other tensors in the place of all that it has, attributes included.

    The original may be in use meanwhile, and what the copy writes to must not be seen there.
    """
    made: dict[int, Any] = {}
    for holder in module.modules():
        twin = made[id(holder)] = _twin(holder, type(holder))
        for table in ("_parameters", "_buffers"):
            filled = {}
            for name, tensor in holder.__dict__[table].items():
                filled[name] = tensor if tensor is None else made.setdefault(id(tensor), fill(tensor))
            twin.__dict__[table] = filled
    for holder in module.modules():
        twin = made[id(holder)]
        twin.__dict__["_modules"] = {name: made.get(id(child)) for name, child in holder._modules.items()}
        _redirect(twin, made, True, fill)
    root: nn.Module = made[id(module)]
    return root


def _twin(module: nn.Module, kind: type) -> Any:
    twin: Any = object.__new__(kind)
    twin.__dict__.update(module.__dict__)  # parameters and buffers stay one with the original's
    return twin


def _copy(name: str, module: nn.Module, watched: set[str], answer: Answer, made: dict[int, Any]) -> nn.Module:
    known: nn.Module | None = made.get(id(module))
    if known is not None:
        return known
    if name in watched:
        made[id(module)] = twin = _asked(name, module, answer)
        return twin
    if isinstance(module, torch.jit.ScriptModule):
        return module  # glue, and nothing in it can be watched
    copy: nn.Module = _twin(module, type(module))
    made[id(module)] = copy
    copy.__dict__["_modules"] = children = dict(module._modules)
    for child_name, child in module._modules.items():
        if child is not None:
            children[child_name] = _copy(dotted_name(name, child_name), child, watched, answer, made)
    return copy


def _asked(name: str, module: nn.Module, answer: Answer) -> nn.Module:
    """Make a twin whose calls, and calls of whose `forward`, go to `answer`."""
    if isinstance(module, torch.jit.ScriptModule):
        return _Scripted(name, module, answer)
    kind = type(module)
    call, forward = kind.__call__, kind.forward

    def asked_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return answer(name, functools.partial(call, self), args, kwargs, True)

    @functools.wraps(forward)
    def asked_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return answer(name, functools.partial(forward, self), args, kwargs, False)

    members = {"__call__": asked_call, "forward": asked_forward, "is_asked": True}
    members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    meta: Any = type(kind)
    twin: nn.Module = _twin(module, meta(kind.__name__, (kind,), members))
    return twin


class _Scripted(nn.Module):
    """Stands for a compiled module, whose class cannot be derived from."""

    is_asked = True

    def __init__(self, name: str, module: nn.Module, answer: Answer) -> None:
        super().__init__()
        self.__dict__.update(_name=name, _module=module, _answer=answer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(self._name, self._module, args, kwargs, True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _redirect(twin: Any, made: dict[int, Any], apart: bool, fill: Callable[[Tensor], Tensor] | None = None) -> None:
    """Let attributes that refer to modules of the tree refer to their copies, also inside of lists and dicts.

    With `fill`, tensors and generators have copies too.
    """
    if isinstance(twin, nn.Module):
        for name, value in list(twin.__dict__.items()):
            if name not in OWN:
                twin.__dict__[name] = _mapped(value, made, apart, 4, fill)


def _mapped(
    value: Any, made: dict[int, Any], apart: bool, depth: int, fill: Callable[[Tensor], Tensor] | None = None
) -> Any:
    if fill is not None and id(value) not in made:
        if isinstance(value, Tensor):
            made[id(value)] = fill(value)
        elif isinstance(value, torch.Generator):
            made[id(value)] = value.clone_state()
    if isinstance(value, (nn.Module, Tensor, torch.Generator)):
        return made.get(id(value), value)
    kind = type(value)
    if not depth or kind not in (list, set, tuple, deque, dict, OrderedDict, defaultdict):
        return value
    before = list(value.values()) if isinstance(value, dict) else list(value)
    after = [_mapped(each, made, apart, depth - 1, fill) for each in before]
    if not apart and all(each is other for each, other in zip(before, after, strict=True)):
        return value
    if isinstance(value, dict):
        copy = value.copy()
        copy.update(zip(value, after, strict=True))
        return copy
    return kind(after)


class Twins:
    """The modules of a model and their copies in one stage's tree: what is set on the one reaches the other.

    What the user sets on a module (a mode, a temperature) is set on its copy. The other way, between steps, what a
    unit's code has set on its copy is given back to the unit, so that the unit's own state (`get_extra_state`), a new
    cut and the user find it where the plain model has it. What the model's code sets on a copy otherwise stays there.
    """

    def __init__(self, model: nn.Module, tree: nn.Module, owned: Iterable[nn.Module] = ()) -> None:
        twins = dict(tree.named_modules())
        named = model.named_modules()
        pairs = {id(own): (own, twins[name]) for name, own in named if twins.get(name, own) is not own}
        self._made: dict[int, Any] = {number: twin for number, (_, twin) in pairs.items()}
        pairs = {number: pair for number, pair in pairs.items() if not isinstance(pair[1], _Scripted)}
        self._twins: dict[int, Any] = {number: twin for number, (_, twin) in pairs.items()}
        self._owned = [pairs[id(unit)] for unit in owned if id(unit) in pairs]
        self.glue = [own for own, twin in pairs.values() if not getattr(twin, "is_asked", False)]

    def follow(self, changes: Iterable[AttributeChange], between: Callable[[nn.Module, str, Any], Any]) -> None:
        """Set on the copies what was set on the modules; `between` says what the code between units gets of it."""
        for own, name in changes:
            twin = self._twins.get(id(own))
            if twin is None or name in _KEPT:
                continue
            is_unit = getattr(twin, "is_asked", False)
            if name not in vars(own):
                twin.__dict__.pop(name, None)
            elif is_unit or name in OWN:
                twin.__dict__[name] = vars(own)[name]
            elif name not in _OF_UNITS:
                twin.__dict__[name] = between(own, name, _mapped(vars(own)[name], self._made, True, 4))

    def give_back(self, settings: ModuleSettings) -> None:
        """Set on the stage's units what their code has set on the copies; what the user has set counts more."""
        for own, twin in self._owned:
            for name, value in list(vars(twin).items()):
                if name not in OWN and vars(own).get(name, _ABSENT) is not value and settings.is_unchanged(own, name):
                    settings.put(own, name, value)


# a copy has its own children, and stand-ins for parameters that are not here; another forward is refused
_KEPT = frozenset({"_modules", "_parameters", "forward"})
_OF_UNITS = frozenset({"_compiled_call_impl"})  # compiled code calls the user's own modules


class StageUnits(nn.Module):
    """The units that a stage owns, as one module: what is trained, moved, saved."""

    def __init__(
        self, units: list[nn.Module], loose: list[Tensor], others: list[nn.Module], twins: list[nn.Module]
    ) -> None:
        super().__init__()
        for number, unit in enumerate(units):
            self.add_module(str(number), unit)
        for number, tensor in enumerate(loose):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"loose_{number}", tensor)
            else:
                self.register_buffer(f"loose_{number}", tensor)
        foreign = {
            id(inner) for module in others if getattr(module, "is_asked", False) for inner in nn.Module.modules(module)
        }
        self.__dict__["_others"] = others  # containers and glue modules of the stage's tree, and stand-ins for units
        self.__dict__["_glue"] = [module for module in others if id(module) not in foreign]
        self.__dict__["_running"] = {id(unit): twin for unit, twin in zip(units, twins, strict=True)}

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """Yield all modules, also those of the stage's tree that hold no parameter: they too have a mode."""
        yield from super().modules(remove_duplicate)
        yield from self.__dict__["_others"]

    def own_modules(self) -> Iterator[nn.Module]:
        """Yield the modules whose state is this stage's: units and glue, but no stand-ins for other stages' units.

        These share their tables with the units themselves, which another rank, on a thread, may be running.
        """
        yield from super().modules()
        yield from self.__dict__["_glue"]

    def running_modules(self) -> Iterator[nn.Module]:
        """Yield the same, with the copy of a unit that runs, and has its attributes, in the unit's place."""
        running = self.__dict__["_running"]
        yield from (running.get(id(module), module) for module in self.own_modules() if module is not self)

    def train(self, mode: bool = True) -> StageUnits:
        super().train(mode)
        for module in self.__dict__["_others"]:
            module.training = mode
        return self


class GlueTensors:
    """Parameters that the glue reads (`self.class_token`), in the stage's tree, and which its module owns.

    Others may take their place in the module: a shard, and what is gathered of it. The tree has to follow, or the glue
    would go on with what it was made with. With buffers it is the other way round: the tree shares the user's tables of
    them, and the module follows where the user puts another into one.
    """

    def __init__(self, root: nn.Module, owned: StageUnits) -> None:
        owners = {
            id(parameter): (owner, name)
            for owner in nn.Module.modules(owned)
            for name, parameter in owner._parameters.items()
            if parameter is not None
        }
        self._parameters = [
            (holder, name, *owners[id(parameter)], parameter)
            for holder in root.modules()
            for name, parameter in holder._parameters.items()
            if parameter is not None
            and id(parameter) in owners
            and owners[id(parameter)][0]._parameters is not holder._parameters
        ]
        held = {id(buffer): name for name, buffer in owned._buffers.items() if buffer is not None}
        self._own = owned._buffers
        self._buffers: dict[tuple[str, str], tuple[nn.Module, Tensor | None]] = {
            (held[id(buffer)], leaf): (holder, buffer)
            for holder in root.modules()
            for leaf, buffer in holder._buffers.items()
            if buffer is not None and id(buffer) in held
        }

    def follow_buffers(self) -> None:
        for (name, leaf), (holder, known) in self._buffers.items():
            now = holder._buffers.get(leaf)
            if now is not known:
                self._own[name] = now
                self._buffers[name, leaf] = holder, now

    def follow_parameters(self) -> None:
        for holder, name, owner, own_name, first in self._parameters:
            now = owner._parameters[own_name]
            if now is not first and holder._parameters[name] is not now:
                holder.__dict__["_parameters"] = {**holder._parameters, name: now}  # the user's module has the old one
