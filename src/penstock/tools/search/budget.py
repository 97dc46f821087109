"""How long a search goes on: for some seconds of computing, or until so many orders are priced.

Seconds are what a user has. They are of this thread's own computing, but a slower processor still gets less done in
them, so the answer may differ from machine to machine. A number of orders is the same work, and the same answer,
everywhere.
"""

from __future__ import annotations

import time

from penstock.errors import UsageError
from penstock.rules import check_count, is_float

USUAL = 5.0  # seconds of a search that is given neither
SECONDS = 1.5e-5  # about what a rule takes for each compute: it tells what there is no time for


class Budget:
    """What a search may spend, and what it has spent so far: seconds, or with `effort` orders."""

    def __init__(self, seconds: float, effort: int | None = None) -> None:
        self.counts_orders = effort is not None
        self.limit = float(seconds if effort is None else effort)
        self.begin = time.thread_time()
        self.orders = 0

    @property
    def seconds(self) -> float:
        """This thread's seconds so far, whatever the limit is of."""
        return time.thread_time() - self.begin

    @property
    def spent(self) -> float:
        """In the unit of the limit."""
        return self.orders if self.counts_orders else time.thread_time() - self.begin

    @property
    def left(self) -> float:
        """In the unit of the limit."""
        return self.limit - self.spent

    def for_a_rule(self, computes: int) -> float:
        """Return about what making an order of this size by a rule takes, in the unit of the limit."""
        return 0.0 if self.counts_orders else computes * SECONDS


def budget_of(seconds: float | None, effort: int | None) -> Budget:
    """Return the budget that a user gave."""
    if seconds is not None and effort is not None:
        raise UsageError(
            f"effort counts orders in place of seconds, got seconds={seconds!r} and effort={effort!r}; give one of them"
        )
    seconds = USUAL if seconds is None else seconds
    if not (is_float(seconds) and seconds >= 0):
        raise UsageError(f"seconds must be a number of 0 or more, got {seconds!r}")
    if effort is not None:
        check_count("effort", effort)
        if not is_float(effort):
            raise UsageError("effort is too large to be counted; for a search without end, give seconds=float('inf')")
    return Budget(seconds, effort)
