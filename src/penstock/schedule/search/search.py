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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from penstock.errors import UsageError
from penstock.schedule.schedule import Schedule
from penstock.schedule.search.budget import Budget, budget_of
from penstock.schedule.search.effort import Effort
from penstock.schedule.search.found import Found, Tried
from penstock.schedule.search.hunt import Hunt, Key
from penstock.schedule.search.orders.evaluate import complete
from penstock.schedule.search.problem import ROUNDING, Orders
from penstock.schedule.search.request import Objective, Progress, Request, request_of
from penstock.schedule.search.space import NoRoom, problems_for
from penstock.schedule.search.uneven.entry import search_uneven
from penstock.schedule.search.uneven.layers import Hosts, Layer
from penstock.schedule.search.unsplit import Unsplit, best_unsplit
from penstock.schedule.timing.costs import Costs

__all__ = ["Starts", "search", "search_even", "search_report"]

Starts = dict[Key, Orders]  # complete orders by placement


def search(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory: float | Sequence[float] | None = None,
    stages_per_rank: int | Iterable[int] = (1, 2, 3, 4),
    placements: str | Iterable[str] = ("loop", "v"),
    *,
    seconds: float = 5.0,
    effort: int | None = None,
    objective: Objective = "makespan",
    recompute: bool = False,
    layers: Iterable[Layer | float] | None = None,
    speeds: Sequence[float] | None = None,
    links: Sequence[Sequence[float]] | Hosts | None = None,
    skips: Iterable[tuple[int, int]] = (),
    vocabulary: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Schedule:
    """Search for the best schedule under costs and a memory cap; never worse than any family that fits.

    Args:
        ranks: Number of ranks.
        microbatches: Number of microbatches.
        costs: Costs of a whole rank: with v stages per rank, each takes 1/v. If given per stage, only that number of
            stages is tried.
        memory: The cap on a rank's peak memory, one number or one per rank, in the unit of `costs.activation`:
            microbatches of a whole rank where that is 1. What `F` takes is held until `I`, `costs.held` until `W`.
        stages_per_rank: The numbers of stages per rank to try.
        placements: The placements to try: `"loop"`, `"v"`.
        seconds: About how long to search.
        effort: How many orders to price, instead of `seconds`: the same answer on every machine.
        objective: `"makespan"`, or `"span"`: the longest time from a rank's own start to its own end.
        recompute: Whether to also try recomputing the forwards of some or all stages. They then keep only `costs.kept`
            until their backward; the schedule's `recompute` names them.
        layers: Cut the model as well: its layers, instead of costs per rank. `search_report` then has the cut as
            `counts`. A number is a layer whose `F`, `I` and `W` take that long each; `costs` may have a hop or sizes.
        speeds: How fast each rank is: 0.5 takes twice as long.
        links: The time of a message from each rank to each other one, or `Hosts`.
        skips: Pairs (from layer, to layer) where a value skips the layers between them.
        vocabulary: Whether the last layer is an output layer whose product may be split over all ranks.
        seed: Where the random numbers start.
        progress: A function that is called with (seconds so far, or orders if `effort` is given; best value so far;
            lower bound).
    """
    return search_report(
        ranks,
        microbatches,
        costs,
        memory,
        stages_per_rank,
        placements,
        seconds=seconds,
        effort=effort,
        objective=objective,
        recompute=recompute,
        layers=layers,
        speeds=speeds,
        links=links,
        skips=skips,
        vocabulary=vocabulary,
        seed=seed,
        progress=progress,
    ).schedule


def search_report(
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory: float | Sequence[float] | None = None,
    stages_per_rank: int | Iterable[int] = (1, 2, 3, 4),
    placements: str | Iterable[str] = ("loop", "v"),
    *,
    seconds: float = 5.0,
    effort: int | None = None,
    objective: Objective = "makespan",
    recompute: bool = False,
    layers: Iterable[Layer | float] | None = None,
    speeds: Sequence[float] | None = None,
    links: Sequence[Sequence[float]] | Hosts | None = None,
    skips: Iterable[tuple[int, int]] = (),
    vocabulary: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Found:
    """Search as `search` does, and also report what was tried, the lower bound and the gap to it.

    Args:
        ranks: Number of ranks.
        microbatches: Number of microbatches.
        costs: Costs of a whole rank, as for `search`.
        memory: The cap on a rank's peak memory, as for `search`.
        stages_per_rank: The numbers of stages per rank to try.
        placements: The placements to try: `"loop"`, `"v"`.
        seconds: About how long to search.
        effort: How many orders to price, instead of `seconds`.
        objective: `"makespan"` or `"span"`.
        recompute: Whether to also try recomputing forwards.
        layers: Cut the model as well, as for `search`.
        speeds: How fast each rank is.
        links: The time of a message from each rank to each other one, or `Hosts`.
        skips: Pairs (from layer, to layer) where a value skips the layers between them.
        vocabulary: Whether the last layer may be split over all ranks.
        seed: Where the random numbers start.
        progress: A function to call with the progress, as for `search`.
    """
    budget = budget_of(seconds, effort)
    request = request_of(
        ranks,
        microbatches,
        costs,
        memory,
        stages_per_rank,
        placements,
        objective=objective,
        recompute=recompute,
        layers=layers,
        speeds=speeds,
        links=links,
        skips=skips,
        vocabulary=vocabulary,
        seed=seed,
        progress=progress,
    )
    return search_uneven(request, budget) if request.uneven else search_even(request, budget, {})[0]


def search_even(request: Request, budget: Budget, starts: Starts) -> tuple[Found, Starts]:
    """The search where costs are by rank or stage, and the best orders of each placement for another one to start with.

    `starts` are such orders, of a search within less memory.
    """
    generator = random.Random(request.seed)
    unsplit = best_unsplit(request)
    try:
        problems = problems_for(request)
    except NoRoom:
        if unsplit is None:
            raise
        return _found(unsplit, request.objective, (), budget.seconds), starts
    hunts = [Hunt(problem, kind, generator, budget) for kind, problem in problems]
    shared = Effort(hunts, budget, request.progress)
    if shared.bound == math.inf:
        raise UsageError("the costs are too large to be added up; give them in a larger unit")
    with _uncollected():
        for hunt in hunts:
            if hunt.key in starts:
                hunt.begin(starts[hunt.key])
        hunt = shared.run(generator)
        reached = {each.key: complete(each.problem, each.best[0]) for each in hunts if each.best}
        schedule = hunt.problem.schedule(reached[hunt.key], "auto")
    tried = tuple(_tried(hunt) for hunt in shared.hunts)
    if unsplit is not None and unsplit.value < hunt.value * (1 - ROUNDING):
        return _found(unsplit, request.objective, tried, budget.seconds), {**starts, **reached}
    bound = shared.bound if unsplit is None else min(shared.bound, unsplit.bound)
    found = Found(schedule, hunt.problem.costs, request.objective, hunt.value, bound, tried, budget.seconds)
    return found, {**starts, **reached}


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
