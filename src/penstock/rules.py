"""Rules for what users pass: whether a value fits, and what would.

A slip shows by its own name and value. Further down it would be a TypeError in code that the user has not written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple

from penstock.errors import UsageError


class ArgumentRule(NamedTuple):
    """What an argument must be."""

    fits: Callable[[Any], bool]
    would_work: str
    or_none: bool = True  # whether None fits as well: left out


def choice(*choices: Any) -> ArgumentRule:
    """Make the rule that the value is one of these."""
    return ArgumentRule(choices.__contains__, f"choose one of {', '.join(map(repr, choices))}", or_none=False)


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number; True is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_index(value: Any, count: int) -> bool:
    """Return whether a value is a whole number from 0 to count - 1."""
    return is_count(value) and 0 <= value < count


def check_count(name: str, value: object) -> None:
    """Refuse what is no whole number of at least 1."""
    if not is_count(value) or value < 1:  # type: ignore[operator]
        raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")


def is_number(value: Any) -> bool:
    """Return whether a value is a real number; True is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_float(value: Any) -> bool:
    """Return whether a value is a real number that a float can hold; a whole number of 400 digits is none."""
    if not is_number(value):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def check_seed(seed: object) -> None:
    """Refuse what cannot start random numbers the same way every time."""
    if not is_count(seed):
        raise UsageError(f"seed is a whole number, such as 0; got {seed!r}")


def check_rules(values: Mapping[str, Any], rules: Mapping[str, ArgumentRule], owner: str = "") -> None:
    """Raise for the first value that does not fit; `owner` is what the values were passed to, if not the pipeline."""
    for name, rule in rules.items():
        value = values[name]
        if not (value is None and rule.or_none) and not rule.fits(value):
            shown = f"{name}={_shown(value)}"
            raise UsageError(f"{f'{owner}({shown})' if owner else shown}: {rule.would_work}")


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__} of shape {tuple(shape)}" if isinstance(shape, tuple) else repr(value)
