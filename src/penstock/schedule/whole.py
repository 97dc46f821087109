"""Whole numbers, as users give them: True and False are none."""

from __future__ import annotations

from penstock.errors import UsageError

__all__ = ["check_count", "is_index"]


def check_count(name: str, value: object) -> None:
    """Refuse what is no whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")


def is_index(number: object, count: int) -> bool:
    """Is it a whole number from 0 to count - 1?"""
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < count
