"""Idle time against memory: the search at one cap after the other, from little memory to much.

Every cap gets a search of its own, the one that `search` would make. What fits into little memory fits into more: where
that search does no better than the cap before it, another one begins with the schedule of that cap. So the makespan
never rises, and no cap does worse than `search` alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.errors import UsageError
from penstock.rules import is_float
from penstock.schedule.builders.problem import ROUNDING
from penstock.schedule.timing.costs import Costs
from penstock.tools.search.bounds.lower_bound import NoRoom
from penstock.tools.search.found import Found
from penstock.tools.search.request import Progress, Request, memory_of_1f1b
from penstock.tools.search.search import search_placements

SHARES = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1, 5 / 4, 3 / 2, 2)  # What 1F1B holds is 1.


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
        """The share of all ranks' time in which they do not compute.

        With less to compute, it rises where the makespan falls less: with `Costs(overlap=)` a schedule with pairs can
        be shorter than another one and idle more.
        """
        return self.found.timeline.bubble


def search_curve(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory: Iterable[float] | None = None,
    stages_per_rank: int | Iterable[int] | None = None,
    placements: str | Iterable[str] = ("loop", "v"),
    *,
    seconds: float | None = None,
    effort: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[CurvePoint, ...]:
    """Search at several memory caps, and return the best schedule of each, the smallest cap first.

    No point is worse than what `search` finds with the same seconds or effort, and more memory never gives a longer
    makespan; nor more idle time, unless `costs.overlap` lets pairs save computing time. Caps that do not hold one
    microbatch are left out.

    Args:
        ranks: Number of ranks.
        microbatches: Number of microbatches.
        costs: Costs of a whole rank, as for `search`.
        memory: The caps. By default, ten of them from a quarter of 1F1B's memory to twice as much.
        stages_per_rank: The numbers of stages per rank to try, as for `search`.
        placements: The placements to try: `"loop"`, `"v"`.
        seconds: About how long to search at each cap, by default 5; as long again where more memory brought nothing at
            first.
        effort: How many orders to price at each cap, instead of `seconds`.
        seed: Where the random numbers start.
        progress: A function to call with the progress, as for `search`.
    """
    asked = Request(
        ranks, microbatches, costs, None, stages_per_rank, placements, seconds=seconds, effort=effort, seed=seed
    )
    if asked.priced.sizes is not None:
        raise UsageError("the curve takes a Costs of microbatches that are alike, such as Costs(forward=2.0)")
    caps = _caps(ranks, asked.priced, memory)
    points: list[CurvePoint] = []
    for number, cap in enumerate(caps):
        request = replace(asked, memory=cap, progress=_shifted(progress, number * asked.budget.limit))
        try:
            points.append(CurvePoint(cap, _point(request, points[-1].found if points else None)))
        except NoRoom as error:
            if number == len(caps) - 1:
                raise UsageError(f"the largest cap is {cap:g}, but {error.fact}; give caps from there on") from None
    return tuple(points)


def _point(request: Request, before: Found | None) -> Found:
    """Return the best schedule within the request's memory; `before` is that of less memory."""
    found = search_placements(request)
    if before is None or found.value < before.value * (1 - ROUNDING):
        return found
    again = search_placements(request, before.schedule)
    best = again if again.value < found.value else found
    if best.value <= before.value:
        return best
    return replace(before, lower_bound=best.lower_bound, tried=best.tried)  # a family with full backwards


def _shifted(progress: Progress | None, begin: float) -> Progress | None:
    """Return the same for a search that begins when so much is spent."""
    return None if progress is None else lambda spent, value, bound: progress(begin + spent, value, bound)


def _caps(ranks: int, costs: Costs, memory: Iterable[float] | None) -> list[float]:
    if memory is None:
        whole = memory_of_1f1b(ranks, costs)
        if not whole:
            raise UsageError("activation is 0, so no cap makes a difference; give what a microbatch holds, or the caps")
        return [share * whole for share in SHARES]
    caps = [*memory] if isinstance(memory, Iterable) else []
    if not caps or not all(is_float(cap) and cap > 0 for cap in caps):
        raise UsageError(f"the caps of a curve are numbers above 0, at least one; got {memory!r}")
    return sorted({float(cap) for cap in caps})
