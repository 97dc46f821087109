"""A model that is changed after it was cut. One rule for all ways to cut:

    followed   what its code computes with: modes, plain attributes, buffers, values and types of parameters
    refused    what it is made of: modules or parameters that are exchanged, added or taken away, other forwards

Stages by position run the user's own modules; replayed ones run copies of some, and graphs have neither:
`StagePart.follow` sees to it. What would need another cut, other messages or another optimizer is refused before a
step. Hooks run where their module runs as it is; where it is copied, captured or passed over, they are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.model.names import dotted_name
from penstock.model.original.settings import AttributeChange, ModuleSettings
from penstock.model.part import StagePart

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_SCRIPTED = torch.jit.ScriptModule  # compiled: nothing in it can be exchanged
_dtype = attrgetter("dtype")


class Changes:
    """What the user does to a model, seen from the stages of this process."""

    def __init__(self, model: Any, parts: Sequence[StagePart]) -> None:
        self._following = [part for part in parts if part.follows]
        named = list(_named_modules(model))
        self._names = {id(module): name for name, module in reversed(named)}
        modules = list({id(module): module for _, module in named}.values())
        copied = list({id(module): module for part in parts for module in part.copied}.values())
        captured = any(part.captured for part in parts)
        self._settings = ModuleSettings(modules, copied, objects=captured)
        self._moves = False  # the model's own code changes its attributes
        self._forwards = {id(module): vars(module).get("forward") for module in modules}
        self._patched: set[int] = set()
        parameters = _Parameters(parts, dict(named), modules, self._where)
        self._types = _Types(parameters.entries())
        self._checks: list[_Watched | _Parameters | _Classes] = [
            _Watched(_entries(model), _other_entries),
            *_module_checks(modules, copied, self._where),
            parameters,
            *([_Classes(modules)] if captured else []),
        ]
        for part in self._following:  # what was set since the cut, by a state that was loaded or moved here
            part.begin(self._settings.all())

    def follow(self) -> bool:
        """Bring what was set on the model to its stages, before a step. Return whether anything was."""
        changes = self._settings.take_changes() + self._types.take_changes()
        self._note(changes)
        for part in self._following:
            part.follow(changes)
        self._moves = self._moves or bool(changes)
        return bool(changes)

    def give_back(self) -> None:
        """Set what stages' code has set on the user's modules, after a step; it is no change of the user's."""
        for part in self._following:
            part.give_back(self._settings)
        if self._moves:
            self._note(self._settings.take_changes())

    def check(self) -> None:
        """Refuse what cannot be followed."""
        fault = self.fault()
        if fault:
            raise ModelError(
                f"{fault}; a pipeline trains the model as it was when the pipeline was built, so make the change "
                f"first, then a new Pipeline and optimizer"
            )

    def fault(self) -> str:
        """Return what about the model is not as it was when it was cut, and cannot be followed; or an empty text."""
        if self._patched:
            return f"the forward of {self._names[next(iter(self._patched))] or 'the model'} was replaced"
        return next((fault for each in (*self._checks, *self._following) if (fault := each.fault())), "")

    def _note(self, changes: Sequence[AttributeChange]) -> None:
        for module, name in changes:
            if name == "forward":
                same = vars(module).get(name) == self._forwards[id(module)]  # a bound method is made anew
                (self._patched.discard if same else self._patched.add)(id(module))

    def _where(self, module: nn.Module, inner: str = "") -> str:
        return dotted_name(self._names[id(module)], inner) or "the model"


def _named_modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield every name of every module; in a list of stage modules, as in an `nn.ModuleList` of them."""
    if isinstance(model, nn.Module):
        yield from model.named_modules(remove_duplicate=False)
        return
    for index, root in enumerate(model or ()):
        for name, module in root.named_modules(remove_duplicate=False):
            yield dotted_name(str(index), name), module


NameOf = Callable[..., str]


class _Watched:
    """Something about a model that must stay as it was: a list that `now` reads, and whose entries `explain` compares.

    `explain` is given an entry's index, what it was and what it is.
    """

    def __init__(self, now: Callable[[], list[Any]], explain: Callable[[int, Any, Any], str]) -> None:
        self._now, self._explain = now, explain
        self._was = [dict(each) if isinstance(each, dict) else each for each in now()]  # Tables change in place.

    def fault(self) -> str:
        now = self._now()
        if now == self._was:
            return ""
        pairs = zip(self._was, now, strict=True)
        return next(self._explain(index, was, found) for index, (was, found) in enumerate(pairs) if was != found)


def _entries(model: Any) -> Callable[[], list[Any]]:
    return lambda: [list(model)] if isinstance(model, list) else []


def _other_entries(index: int, was: list[Any], now: list[Any]) -> str:
    return f"the list of stage modules was changed (it has {len(now)} entries, and had {len(was)})"


def _module_checks(modules: Sequence[nn.Module], copied: Sequence[nn.Module], where: NameOf) -> list[_Watched]:
    """Watch the classes of modules, their forwards, the children, and hooks of modules that do not run as they are."""
    python = [module for module in modules if not isinstance(module, _SCRIPTED)]
    kinds: list[Any] = list(dict.fromkeys(map(type, python)))
    hooks = [(module, name) for module in copied for name in HOOKS if name in vars(module)]

    def other_kind(index: int, was: type, now: type) -> str:
        return f"{where(python[index])} was a {was.__name__} and is a {now.__name__} now"

    def other_children(index: int, was: dict[str, Any], now: dict[str, Any]) -> str:
        name = next(name for name in {**was, **now} if now.get(name) is not was.get(name))
        what = "exchanged" if now.get(name) and was.get(name) else "added" if now.get(name) else "taken away"
        return f"{where(python[index], name)} was {what}"

    def other_hooks(index: int, was: Any, now: Any) -> str:
        return (
            f"a hook was added to {where(hooks[index][0])} or taken from it, whose own code does not run as it is: it "
            f"is spread over stages, or captured in a graph"
        )

    return [
        _Watched(lambda: [*map(type, python)], other_kind),
        _Watched(lambda: [module._modules for module in python], other_children),
        _Watched(
            lambda: [kind.forward for kind in kinds], lambda index, *_: f"{kinds[index].__name__}.forward was replaced"
        ),
        _Watched(lambda: [module.__dict__[name] for module, name in hooks], other_hooks),
    ]


class _Parameters:
    """The parameters that stages of this process have; others may be elsewhere."""

    def __init__(
        self, parts: Sequence[StagePart], named: dict[str, nn.Module], modules: Sequence[nn.Module], where: NameOf
    ) -> None:
        self._where = where
        places = (full.rpartition(".") for part in parts for full in part.names.values())
        own = {(id(named[holder]), leaf) for holder, _, leaf in places if holder in named}
        python = [module for module in modules if not isinstance(module, _SCRIPTED)]
        self._whole = [each for each in python if all((id(each), leaf) in own for leaf in each._parameters)]
        whole = set(self._whole)
        some = ((each, leaf) for each in python if each not in whole for leaf in each._parameters)
        self._single = [(each, leaf) for each, leaf in some if (id(each), leaf) in own]
        self._was = self._now()  # an id counts for as long as its object lives
        self._ids = [*map(id, self._was)]

    def _now(self) -> list[nn.Parameter | None]:
        found = list(chain.from_iterable([module._parameters.values() for module in self._whole]))
        return found + [module._parameters.get(leaf) for module, leaf in self._single] if self._single else found

    def entries(self) -> list[tuple[nn.Module, str]]:
        return [(module, leaf) for module in self._whole for leaf in module._parameters] + self._single

    def fault(self) -> str:
        if [*map(id, self._now())] == self._ids:
            return ""
        for module, leaf in self.entries():
            parameter = module._parameters.get(leaf)
            if parameter is not None and id(parameter) not in self._ids:
                return f"the parameter {self._where(module, leaf)} was added, or exchanged for another"
        gone = [module for module in self._whole if None in module._parameters.values()]
        return f"a parameter{f' of {self._where(gone[0])}' if gone else ''} was taken away, or put elsewhere"


class _Types:
    """The types of parameters, as `model.double()` changes them."""

    def __init__(self, entries: Sequence[tuple[nn.Module, str]]) -> None:
        found = [(module, parameter) for module, leaf in entries if (parameter := module._parameters[leaf]) is not None]
        self._modules, self._parameters = [module for module, _ in found], [parameter for _, parameter in found]
        self._was = [*map(_dtype, self._parameters)]

    def take_changes(self) -> list[AttributeChange]:
        """Return the modules whose parameters are of another type than at the last look."""
        now = [*map(_dtype, self._parameters)]
        if now == self._was:
            return []
        changed = [index for index, kind in enumerate(now) if kind != self._was[index]]
        self._was = now
        return [(self._modules[index], "_parameters") for index in changed]


class _Classes:
    """All that the classes of captured modules have."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        kinds = [kind for kind in map(type, modules) if not issubclass(kind, _SCRIPTED)]
        own = dict.fromkeys(base for kind in kinds for base in kind.__mro__ if issubclass(base, nn.Module))
        self._was = [(base, dict(vars(base))) for base in own if base is not nn.Module]

    def fault(self) -> str:
        for base, was in self._was:
            now = vars(base)
            if len(was) == len(now) and all(map(is_, was.values(), now.values())):
                continue
            for name in dict.fromkeys((*was, *now)):
                if now.get(name) is not was.get(name) and not name.startswith("__"):
                    return f"{base.__name__}.{name} was replaced"
        return ""
