"""Parameter groups for an optimizer, by the names that parameters have in the whole model.

The groups are a function of names alone, and every rank has all of them, in the same order, also where it owns none of
a group's parameters: so they come out the same at any number of stages, an optimizer's state can move between numbers
of stages, and a rank without parameters still has an optimizer whose learning rate goes along.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

from torch import Tensor, nn

from penstock.errors import UsageError

NamedParameters = Iterable[tuple[str, nn.Parameter]]
REST = "rest"
SHOWN = 5


class _HasGroups(Protocol):
    def parameter_groups(self, rules: Mapping[Any, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]: ...


def parameter_groups(
    model: nn.Module | _HasGroups, rules: Mapping[Any, Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Group parameters for a torch optimizer, of a plain module or of a pipeline.

    Args:
        model: An `nn.Module` or a `Pipeline`.
        rules: A dict of name patterns to options, such as `{"*.bias": {"weight_decay": 0.0}}`. The first pattern
            that matches decides; what matches none is in a last group.
    """
    if isinstance(model, nn.Module):
        return group_parameters(rules or {}, list(model.named_parameters()), list(model.named_parameters()), {})
    if not hasattr(model, "parameter_groups"):
        raise UsageError(f"parameter_groups() takes a Pipeline or an nn.Module, not a {type(model).__name__}")
    return model.parameter_groups(rules)


def group_parameters(
    rules: Mapping[Any, Mapping[str, Any]], own: NamedParameters, every: NamedParameters, aliases: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Make one group for each rule, in their order, and one for the rest; of `own`, checked against `every`."""
    _check(rules)
    patterns = [(label, _patterns(label), options) for label, options in rules.items()]
    everything = list(every)
    _check_use(patterns, everything, aliases)
    groups = [{"params": [], "name": _called(label), **options} for label, _, options in patterns]
    groups.append({"params": [], "name": REST})
    for name, parameter in own:
        groups[_first(patterns, name, parameter)]["params"].append(parameter)
    return groups


def _check(rules: Any) -> None:
    if not isinstance(rules, Mapping):
        raise UsageError(
            f"parameter_groups() got a {type(rules).__name__}; pass a dict of patterns to options, such as "
            f"{{'*.bias': {{'weight_decay': 0.0}}}}"
        )
    for label, options in rules.items():
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise UsageError(
                f"{_called(label)}: its options are {options!r}; pass a dict such as {{'weight_decay': 0.0}}"
            )
        taken = sorted({"params", "name"} & set(options))
        if taken:
            raise UsageError(f"{_called(label)}: the option {taken[0]!r} is filled in here; leave it out")


def _patterns(label: Any) -> tuple[Any, ...]:
    found = label if isinstance(label, (tuple, frozenset)) else (label,)
    for pattern in found:
        if not (isinstance(pattern, (str, re.Pattern)) or callable(pattern)):
            raise UsageError(
                f"{pattern!r} is not a pattern of names; pass text such as '*.bias', a compiled regular expression, or "
                f"a function of (name, parameter)"
            )
    if not found:
        raise UsageError("an empty tuple matches no parameter; leave it out")
    return tuple(found)


def _matches(pattern: Any, name: str, parameter: Tensor) -> bool:
    if isinstance(pattern, str):
        return fnmatchcase(name, pattern)
    if isinstance(pattern, re.Pattern):
        return pattern.search(name) is not None
    return bool(pattern(name, parameter))


Rules = Sequence[tuple[Any, tuple[Any, ...], Mapping[str, Any]]]


def _first(rules: Rules, name: str, parameter: Tensor) -> int:
    """Return the number of the first rule that matches; where none does, that of the rest."""
    for number, (_, patterns, _) in enumerate(rules):
        if any(_matches(pattern, name, parameter) for pattern in patterns):
            return number
    return len(rules)


def _check_use(rules: Rules, every: Sequence[tuple[str, nn.Parameter]], aliases: Mapping[str, str]) -> None:
    """Refuse a pattern that decides nothing: nobody would see that its options do not hold."""
    used = {_first(rules, name, parameter) for name, parameter in every}
    for number, (label, patterns, _) in enumerate(rules):
        for pattern in patterns:
            if not any(_matches(pattern, name, parameter) for name, parameter in every):
                raise UsageError(unmatched(pattern, [name for name, _ in every], aliases))
        if number not in used:
            raise UsageError(
                f"{_called(label)}: every parameter that it matches is taken by a pattern before it, and the first "
                f"counts; put it first"
            )


def unmatched(pattern: Any, names: Sequence[str], aliases: Mapping[str, str]) -> str:
    """Make the error about a pattern that matches no parameter: near names, or the name that a tied one goes by."""
    text = f"{_called(pattern)} matches none of the model's {len(names)} parameters"
    if isinstance(pattern, str):
        tied = [name for name in aliases if fnmatchcase(name, pattern)]
        if tied:
            return f"{text}; {tied[0]} is tied to {aliases[tied[0]]} and goes by that name"
    sought = pattern if isinstance(pattern, str) else getattr(pattern, "pattern", "")
    near = difflib.get_close_matches(str(sought), names, SHOWN, 0.3) or list(names[:SHOWN])
    return f"{text}; among them are {', '.join(near)}" if near else f"{text}, since it has none"


def _called(label: Any) -> str:
    if isinstance(label, (tuple, frozenset)):
        return ", ".join(map(_called, label))
    if isinstance(label, re.Pattern):
        return str(label.pattern)
    return label if isinstance(label, str) else str(getattr(label, "__name__", type(label).__name__))
