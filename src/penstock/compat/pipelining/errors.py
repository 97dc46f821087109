"""Errors of two families: Penstock's own, and the built-in class that torch raises in the same situation.

A script written for torch catches `RuntimeError`, `TypeError` or `AssertionError`; one written for Penstock catches
`PenstockError`. Each of these classes is both.
"""

from __future__ import annotations

from penstock.errors import NotationError, ScheduleError, UsageError


class InvalidAction(NotationError, RuntimeError):
    """Text that is neither an action nor the name of a kind of action."""


class InvalidOrder(ScheduleError, AssertionError):
    """An order of actions that cannot run; `faults` lists everything that is wrong with it."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument of a type that cannot work."""


class UnsupportedFormat(UsageError, NotImplementedError):
    """A format of orders that there is not."""


class TooManyRanks(UsageError, RuntimeError):
    """More ranks than stages."""
