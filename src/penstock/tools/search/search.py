"""The search over placements: how many stages per rank, in a loop or in a V, and in which order.

`search` returns the schedule; `search_report` says what was tried beside it, and how far the
answer is from a bound that nothing can beat. Both take costs and memory *per rank*, because
that is what stays the same when the number of stages per rank is open: with v stages per rank each
takes 1 / v of the time and holds 1 / v of the memory, while a hop costs what it costs. Costs
given stage by stage say how many stages there are, and only that number is tried.

More time only makes the answer better. `seconds` are of this thread's own computing, so that a
busy machine does not make the answer worse. `effort` is a number of orders to price instead: the
answer is then the same on every machine. With `seconds=0` the families and, on pipelines that are
not large, a few rules are tried, and nothing depends on the clock either.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from penstock.errors import UsageError
from penstock.schedule.builders.problem import ROUNDING
from penstock.schedule.schedule import Schedule
from penstock.tools.search.bounds.lower_bound import NoRoom
from penstock.tools.search.budget import Budget
from penstock.tools.search.effort import Effort
from penstock.tools.search.found import Found, Tried
from penstock.tools.search.hunt import Hunt
from penstock.tools.search.orders.evaluate import complete
from penstock.tools.search.request import Request, asked
from penstock.tools.search.space import problems_for
from penstock.tools.search.uneven.entry import search_uneven
from penstock.tools.search.unsplit import Unsplit, best_unsplit

__all__ = ["search", "search_even", "search_report"]


@asked(Request, "Search for the best schedule under costs and a memory cap; never worse than a built family that fits.")
def search(request: Request) -> Schedule:
    """The schedule of the report."""
    return _report(request).schedule


@asked(Request, "Search as `search` does, and also report what was tried, the lower bound and the gap to it.")
def search_report(request: Request) -> Found:
    """The whole report."""
    return _report(request)


def _report(request: Request) -> Found:
    budget = request.budget
    return search_uneven(request, budget) if request.uneven else search_even(request, budget)


def search_even(request: Request, budget: Budget, start: Schedule | None = None) -> Found:
    """The search where costs are by rank or stage. `start` is a schedule to begin with, within less memory."""
    generator = random.Random(request.seed)
    unsplit = best_unsplit(request)
    try:
        problems = problems_for(request)
    except NoRoom:
        if unsplit is None:
            raise
        return _found(unsplit, request.objective, (), budget.seconds)
    hunts = [Hunt(problem, kind, generator, budget) for kind, problem in problems]
    shared = Effort(hunts, budget, request.progress)
    if shared.bound == math.inf:
        raise UsageError("the costs are too large to be added up; give them in a larger unit")
    with _uncollected():
        for hunt in hunts:
            if start is not None and hunt.is_of(start):
                hunt.begin(hunt.problem.numbers([[*filter(None, row)] for row in start.rows]))
        hunt = shared.run(generator)
        schedule = hunt.problem.schedule(complete(hunt.problem, hunt.best[0]), "auto")
    tried = tuple(_tried(hunt) for hunt in shared.hunts)
    if unsplit is not None and unsplit.value < hunt.value * (1 - ROUNDING):
        return _found(unsplit, request.objective, tried, budget.seconds)
    bound = shared.bound if unsplit is None else min(shared.bound, unsplit.bound)
    found = Found(schedule, hunt.problem.costs, request.objective, hunt.value, bound, tried, budget.seconds)
    return replace(found, value=found.steady.period) if request.objective == "steady" else found


def _found(best: Unsplit, objective: str, tried: tuple[Tried, ...], seconds: float) -> Found:
    """A family with full backwards is the answer."""
    size, again = best.schedule.placement.stages_per_rank, tuple(sorted(best.schedule.recompute))
    entry = Tried(size, best.kind, best.value, best.bound, 1, again)
    others = [other for other in tried if other.key != entry.key]
    bound = min(other.lower_bound for other in (entry, *tried))
    return Found(best.schedule, best.costs, objective, best.value, bound, (*others, entry), seconds)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector: there are no cycles here, and it would look through all orders again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _tried(hunt: Hunt) -> Tried:
    """What came of a hunt."""
    again = tuple(sorted(hunt.problem.recompute))
    return Tried(hunt.stages_per_rank, hunt.kind, hunt.value, hunt.bound, hunt.orders, again)
