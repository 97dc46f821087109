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

import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate

from penstock.errors import UsageError
from penstock.schedule.action import Action
from penstock.schedule.builders.filling import complete
from penstock.schedule.builders.problem import Problem
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.timing.costs import Costs
from penstock.tools.search.bounds.lower_bound import NoRoom
from penstock.tools.search.budget import Budget
from penstock.tools.search.cut_search import search_cut
from penstock.tools.search.explore import explore
from penstock.tools.search.found import Found
from penstock.tools.search.placement_search import PlacementSearch
from penstock.tools.search.placements import no_room, problems_for
from penstock.tools.search.request import Request, asked

TUNED = 3_000_000  # orders times computes, for a builder: two or three seconds


@asked(Request, "Search for the best schedule under costs and a memory cap; never worse than a built family that fits.")
def search(request: Request) -> Schedule:
    """Return the schedule of the report."""
    return _report(request).schedule


@asked(Request, "Search as `search` does, and also report what was tried, the lower bound and the gap to it.")
def search_report(request: Request) -> Found:
    """Return the whole report."""
    return _report(request)


def _report(request: Request) -> Found:
    if request.layers is None:
        given = {"speeds": request.speeds is not None, "skips": bool(request.skips), "vocabulary": request.vocabulary}
        for name in (name for name, is_given in given.items() if is_given):
            raise UsageError(f"{name} is about layers that are still to be cut; give layers= as well")
    if request.objective != "makespan" and (request.layers is not None or request.priced.sizes is not None):
        raise UsageError(
            f"objective={request.objective!r} is for costs by rank or stage; with layers or sizes it is the makespan"
        )
    return search_placements(request) if request.layers is None else search_cut(request)


def search_placements(request: Request, start: Schedule | None = None) -> Found:
    """Search where costs are by rank or stage. `start` is a schedule to begin with, within less memory."""
    generator, budget = random.Random(request.seed), request.budget
    problems = problems_for(request)
    searches = list[PlacementSearch]()
    for kind, problem in problems:
        with suppress(NoRoom):  # another placement, or choice of stages that recompute, may have it
            searches.append(PlacementSearch(problem, kind, generator, budget))
    if any(each.bound == math.inf for each in searches):
        raise UsageError("the costs are too large to be added up; give them in a larger unit")
    if start is not None:
        for each in searches:
            if (start.placement, start.recompute) == (each.problem.placement, each.problem.recompute):
                each.begin(each.problem.numbers([[*filter(None, row)] for row in start.rows]))
    best = explore(searches, budget, generator, request.progress) if searches else None
    if best is None or best.value == math.inf:
        raise no_room([problem for _, problem in problems], request)
    tried, bound = tuple(each.tried for each in searches), min(each.bound for each in searches)
    found = Found(best.schedule(), best.problem.costs, request.objective, best.value, bound, tried, budget.seconds)
    return replace(found, value=found.steady.period) if request.objective == "steady" else found


def tuned(
    rows: Sequence[Sequence[Action]], placement: Placement, microbatches: int, costs: Costs, cap: int
) -> list[list[Action]]:
    """Return the best order found from a builder's for costs per stage, for `build(name, ..., costs=)`.

    It is within the family's own memory, of `cap` stages of microbatches per rank, and never longer than the builder's.
    The effort is a number of orders, so that the same arguments make the same schedule everywhere.
    """
    if costs.sizes is not None:
        raise UsageError("build takes costs of microbatches that are alike; for sizes, see order_microbatches")
    alike = replace(costs, activation=1.0, held=None, kept=0.0, overlap=None)
    problem = Problem(placement, microbatches, alike, (math.inf,) * placement.ranks)
    orders = problem.numbers(rows)
    # some orders of short batches need more than they promise
    most = max(cap, *(max(accumulate(problem.takes[x] for x in order)) for order in orders))
    problem = problem.but(caps=(most,) * placement.ranks)
    budget = Budget(0.0, max(100, min(600, TUNED // (3 * problem.size))))
    own = PlacementSearch(problem, "", random.Random(0), budget)
    own.begin(orders)
    if not own.large:
        for _ in own.rules():
            pass
        while budget.left > 0 and own.can_beat(own.value):
            own.step()
    return [[problem.action(x) for x in order] for order in complete(problem, own.best[0])]
