"""Idle time against memory: the search at one cap after the other, from little memory to much.

What fits into little memory fits into more. So each cap begins with the orders that the caps below it ended with, and
the curve never rises: no cap has less idle time than a larger one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.errors import UsageError
from penstock.schedule.search.budget import Budget, budget_of
from penstock.schedule.search.found import Found
from penstock.schedule.search.request import Progress, request_of
from penstock.schedule.search.search import Starts, search_even
from penstock.schedule.search.space import NoRoom
from penstock.schedule.timing.costs import Costs, is_number

__all__ = ["CurvePoint", "search_curve"]

SHARES = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1, 5 / 4, 3 / 2, 2)  # of 1F1B's memory


@dataclass(frozen=True)
class CurvePoint:
    """What was found within one cap.

    Attributes:
        memory: The cap on the memory of each rank.
        found: The schedule and how good it is.
    """

    memory: float
    found: Found

    @property
    def idle(self) -> float:
        """The share of all ranks' time in which they do not compute."""
        return self.found.timeline.bubble


def search_curve(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory: Iterable[float] | None = None,
    stages_per_rank: int | Iterable[int] = (1, 2, 3, 4),
    placements: str | Iterable[str] = ("loop", "v"),
    *,
    seconds: float = 20.0,
    effort: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[CurvePoint, ...]:
    """Search at several memory caps, and return the best schedule of each, the smallest cap first.

    More memory never gives more idle time: each search begins with what the ones before it found. Caps that do not
    hold one microbatch are left out.

    Args:
        ranks: Number of ranks.
        microbatches: Number of microbatches.
        costs: Costs of a whole rank, as for `search`.
        memory: The caps. By default, ten of them from a quarter of 1F1B's memory to twice as much.
        stages_per_rank: The numbers of stages per rank to try.
        placements: The placements to try: `"loop"`, `"v"`.
        seconds: About how long to search, for all caps together.
        effort: How many orders to price for all caps together, instead of `seconds`.
        seed: Where the random numbers start.
        progress: A function to call with the progress, as for `search`.
    """
    whole = budget_of(seconds, effort)
    request = request_of(ranks, microbatches, costs, None, stages_per_rank, placements, seed=seed, progress=progress)
    if request.uneven:
        raise UsageError("the curve takes a Costs of microbatches that are alike, such as Costs(forward=2.0)")
    caps = _caps(ranks, request.costs, memory)
    points: list[CurvePoint] = []
    starts: Starts = {}
    spent = 0.0
    for number, cap in enumerate(caps):
        share = (number + 1) / len(caps)
        left = share * whole.limit - spent
        budget = Budget(left, max(1, round(left)) if whole.counts_orders else None)
        try:
            found, starts = search_even(replace(request, caps=(cap,) * ranks), budget, starts)
        except NoRoom:
            if number == len(caps) - 1 and not points:
                raise
            continue
        spent += budget.spent
        if points and points[-1].found.value < found.value:  # a family with full backwards
            found = replace(points[-1].found, lower_bound=found.lower_bound, tried=found.tried)
        points.append(CurvePoint(cap, found))
    return tuple(points)


def _caps(ranks: int, costs: Costs, memory: Iterable[float] | None) -> list[float]:
    if memory is None:
        held = costs.activation
        whole = held if isinstance(held, (int, float)) else sum(held) / ranks
        return [share * ranks * whole for share in SHARES]
    caps = sorted({*memory}) if isinstance(memory, Iterable) else []
    if not caps or not all(is_number(cap) and cap > 0 for cap in caps):
        raise UsageError(f"the caps of a curve are numbers above 0, at least one; got {memory!r}")
    return [float(cap) for cap in caps]
