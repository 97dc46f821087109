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
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["OWN", "Answer", "Followed", "give_back", "hollow_copy", "stage_tree"]

# (name, what runs the unit, args, kwargs, whether by a call and not by `forward`) -> output
Answer = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any], bool], Any]
OWN = frozenset(nn.Module().__dict__)  # what every module has
_ABSENT = object()


def stage_tree(model: nn.Module, watched: set[str], answer: Answer, *, apart: bool = True) -> nn.Module:
    """The copy; `answer` is asked at every call of a watched module. `apart` copies plain lists and dicts as well."""
    made: dict[int, Any] = {}
    root = _copy("", model, watched, answer, made)
    for twin in list(made.values()):
        if not getattr(type(twin), "is_asked", False):
            _redirect(twin, made, apart)
    return root


def hollow_copy(module: nn.Module, fill: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy with other tensors in the place of parameters and buffers; the original may be in use meanwhile."""
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
        _redirect(twin, made, True)
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
            children[child_name] = _copy(f"{name}.{child_name}" if name else child_name, child, watched, answer, made)
    return copy


def _asked(name: str, module: nn.Module, answer: Answer) -> nn.Module:
    """A twin whose calls, and calls of whose `forward`, go to `answer`."""
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
    """In the place of a compiled module, whose class cannot be derived from."""

    is_asked = True

    def __init__(self, name: str, module: nn.Module, answer: Answer) -> None:
        super().__init__()
        self.__dict__.update(_name=name, _module=module, _answer=answer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(self._name, self._module, args, kwargs, True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _redirect(twin: Any, made: dict[int, Any], apart: bool) -> None:
    """Attributes that refer to modules of the tree refer to their copies, also inside of lists and dicts."""
    if isinstance(twin, nn.Module):
        for name, value in list(twin.__dict__.items()):
            if name not in OWN:
                twin.__dict__[name] = _mapped(value, made, apart, 4)


def _mapped(value: Any, made: dict[int, Any], apart: bool, depth: int) -> Any:
    if isinstance(value, (nn.Module, Tensor)):
        return made.get(id(value), value)
    kind = type(value)
    if not depth or kind not in (list, set, tuple, deque, dict, OrderedDict, defaultdict):
        return value
    before = list(value.values()) if isinstance(value, dict) else list(value)
    after = [_mapped(each, made, apart, depth - 1) for each in before]
    if not apart and all(each is other for each, other in zip(before, after, strict=True)):
        return value
    if isinstance(value, dict):
        copy = value.copy()
        copy.update(zip(value, after, strict=True))
        return copy
    return kind(after)


class Followed:
    """What the user sets on the model after it was copied (a temperature, a flag) reaches the copies.

    Only what has changed on the original since the last look: what the model's code has set on a copy stays. The
    other way, between steps, what a unit's code has set on its copy is given back to the unit (`give_back`).
    """

    def __init__(self, model: nn.Module, tree: nn.Module, owned: Iterable[nn.Module] = ()) -> None:
        twins = dict(tree.named_modules())
        self._pairs = [
            (own, twins[name], dict(vars(own)))
            for name, own in model.named_modules()
            if twins.get(name, own) is not own and not isinstance(twins[name], _Scripted)
        ]
        mine = set(map(id, owned))
        self._owned = [pair for pair in self._pairs if id(pair[0]) in mine]

    def look(self) -> bool:
        """Take over what has changed; whether anything has."""
        changed = False
        for own, twin, seen in self._pairs:
            for name, value in vars(own).items():
                if name not in OWN and (name not in seen or seen[name] is not value):
                    seen[name] = twin.__dict__[name] = value
                    changed = True
        return changed

    def give_back(self) -> list[tuple[nn.Module, str, Any]]:
        """Put what the units' code has set since the last time on the units; returns what that was."""
        found = []
        for own, twin, seen in self._owned:
            table = vars(own)
            for name, value in list(vars(twin).items()):
                now = table.get(name, _ABSENT)
                if name not in OWN and now is not value and now is seen.get(name, _ABSENT):  # the user's word counts
                    seen[name] = table[name] = value
                    found.append((own, name, value))
        return found

    def know(self, given: Iterable[tuple[nn.Module, str, Any]]) -> None:
        """Another stage has given this back: it is none of the user's settings, which all stages take over."""
        by_module = {id(own): seen for own, _, seen in self._pairs}
        for own, name, value in given:
            if id(own) in by_module:
                by_module[id(own)][name] = value


def give_back(stages: Iterable[Followed]) -> None:
    """While no stage runs: the model's units get what their code has set, as if they had run themselves.

    So a unit's own state (`get_extra_state`), a new cut and the user find it where the plain model has it.
    """
    all_of_them = list(stages)
    given = [each for stage in all_of_them for each in stage.give_back()]
    if given:
        for stage in all_of_them:
            stage.know(given)
