"""A family's order for costs that are known: `build(name, ..., costs=)`.

A builder alone says in which order things run if all take the same time. With costs, its order is only where a short
search begins: on the family's own placement, within the family's own memory, with W filled in for the true times. What
comes back is never longer than the family's order. The effort is a number of orders, so that the same arguments make
the same schedule everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import UsageError
from penstock.schedule.action import Action
from penstock.schedule.builders.filling import complete
from penstock.schedule.builders.problem import Problem
from penstock.schedule.placement import Placement
from penstock.schedule.timing.costs import Costs
from penstock.tools.search.budget import Budget
from penstock.tools.search.placement_search import PlacementSearch

__all__ = ["tuned"]

EFFORT = 3_000_000  # orders times computes, about: two or three seconds
FEWEST, MOST = 100, 600  # orders


def tuned(
    rows: Sequence[Sequence[Action]], placement: Placement, microbatches: int, costs: Costs, cap: int
) -> list[list[Action]]:
    """Return the best order found for these costs per stage, in memory for `cap` stages of microbatches per rank."""
    if costs.sizes is not None:
        raise UsageError("build takes costs of microbatches that are alike; for sizes, see order_microbatches")
    alike = replace(costs, activation=1.0, held=None, kept=0.0, overlap=None)
    most = max(cap, *(_most_held(row) for row in rows))  # some orders of short batches need more than they promise
    problem = Problem(placement, microbatches, alike, (float(most),) * placement.ranks)
    budget = Budget(0.0, max(FEWEST, min(MOST, EFFORT // (3 * problem.size))))
    search = PlacementSearch(problem, "", random.Random(0), budget)
    search.begin(problem.numbers(rows))
    if not search.large:
        for _ in search.rules():
            pass
        while budget.left > 0 and search.can_beat(search.value):
            search.step()
    return [[problem.action(x) for x in order] for order in complete(problem, search.best[0])]


def _most_held(row: Sequence[Action]) -> int:
    """Return the most stages of microbatches that a rank holds at once, from F to W or B."""
    held = most = 0
    for action in row:
        for part in action.parts():
            held += {"F": 1, "W": -1, "B": -1}.get(part.op.name, 0)
            most = max(most, held)
    return most
