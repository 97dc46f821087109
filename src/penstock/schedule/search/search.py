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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from penstock.errors import UsageError
from penstock.rules import check_count
from penstock.schedule.schedule import Schedule
from penstock.schedule.search.budget import Budget
from penstock.schedule.search.effort import Effort, Progress
from penstock.schedule.search.evaluate import complete
from penstock.schedule.search.hunt import Hunt, Key
from penstock.schedule.search.problem import ROUNDING, Orders
from penstock.schedule.search.space import (
    PLACEMENTS,
    NoRoom,
    never,
    placements_for,
    problems_for,
    stages_to_recompute,
)
from penstock.schedule.search.uneven.layers import Hosts, Layer, Request
from penstock.schedule.search.unsplit import Unsplit, best_unsplit
from penstock.schedule.timing.bounds import caps_of
from penstock.schedule.timing.costs import Costs, is_number
from penstock.schedule.timing.simulate import simulate
from penstock.schedule.timing.timeline import Timeline

__all__ = ["Found", "Progress", "Starts", "Tried", "search", "search_even", "search_report"]

Objective = Literal["makespan", "span"]
Starts = dict[Key, Orders]  # complete orders by placement


@dataclass(frozen=True)
class Tried:
    """What came out for one number of stages per rank and one placement."""

    stages_per_rank: int
    placement: str
    value: float  # the objective of the best order; infinite where none fits
    lower_bound: float
    orders: int  # how many were priced
    recompute: tuple[int, ...] = ()  # the stages that run their forward again

    @property
    def key(self) -> tuple[int, str, tuple[int, ...]]:
        """What it is of."""
        return self.stages_per_rank, self.placement, self.recompute


@dataclass(frozen=True)
class Found:
    """The best schedule that a search found, and how good it is.

    Attributes:
        schedule: The schedule.
        costs: The costs of one stage, as `simulate` takes them.
        objective: What was minimised: `"makespan"` or `"span"`.
        value: The value of the objective.
        lower_bound: A value that no allowed schedule can beat.
        tried: What was tried: each number of stages per rank, placement and choice of recomputing stages.
        seconds: How long the search took.
    """

    schedule: Schedule
    costs: Costs  # of one stage, as `simulate` takes them
    objective: str
    value: float  # the makespan, or the longest span
    lower_bound: float  # of all that was allowed: every number of stages per rank, every placement
    tried: tuple[Tried, ...]
    seconds: float

    @property
    def gap(self) -> float:
        """How far the value is above the lower bound, as a share of it; 0 is proved best."""
        return max(0.0, self.value / self.lower_bound - 1) if self.lower_bound else 0.0

    @property
    def proved(self) -> bool:
        """Whether nothing can be better."""
        return self.value <= self.lower_bound * (1 + ROUNDING)

    @property
    def chosen(self) -> Tried:
        """The entry of `tried` that the schedule comes from."""
        placement = self.schedule.placement
        size, again = placement.stages_per_rank, tuple(sorted(self.schedule.recompute))
        return next(
            entry
            for entry in self.tried
            if (entry.stages_per_rank, entry.recompute) == (size, again)
            and PLACEMENTS[entry.placement](placement.ranks, size) == placement
        )

    @cached_property
    def timeline(self) -> Timeline:
        """The schedule priced with its costs."""
        return simulate(self.schedule, self.costs)

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return self.timeline.makespan

    def __repr__(self) -> str:
        return f"<Found {self.schedule!r} {self.objective} {self.value:g}, {self.gap:.1%} above the bound>"


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
    if not (is_number(seconds) and seconds >= 0):
        raise UsageError(f"seconds must be a number of 0 or more, got {seconds!r}")
    if effort is not None:
        check_count("effort", effort)
    if costs is not None and not isinstance(costs, Costs):
        raise UsageError(f"costs must be a Costs, such as Costs(forward=2.0, input=2.0, weight=1.0); got {costs!r}")
    if not isinstance(recompute, bool):
        raise UsageError(f"recompute is True or False, got {recompute!r}")
    if objective not in ("makespan", "span"):
        raise UsageError(f"the objective is makespan or span, got {objective!r}")
    budget = Budget(seconds, effort)
    if links is not None:
        costs = replace(costs or Costs(), links=links.matrix() if isinstance(links, Hosts) else links)
    costs = costs or Costs()
    if layers is not None or speeds is not None or skips or vocabulary or costs.sizes is not None:
        from penstock.schedule.search.uneven.entry import search_uneven  # which returns a Found

        sizes, kinds = _listed(ranks, microbatches, stages_per_rank, placements)
        request = Request(layers, speeds, tuple(skips), vocabulary)
        caps, span = caps_of(memory, ranks), objective == "span"
        return search_uneven(
            ranks, microbatches, costs, caps, sizes, kinds, request, budget, span, recompute, seed, progress
        )
    return search_even(
        ranks, microbatches, costs, memory, stages_per_rank, placements, budget, objective, recompute,
        random.Random(seed), progress, {},
    )[0]  # fmt: skip


def search_even(
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory: float | Sequence[float] | None,
    stages_per_rank: int | Iterable[int],
    placements: str | Iterable[str],
    budget: Budget,
    objective: Objective,
    recompute: bool,
    generator: random.Random,
    progress: Progress | None,
    starts: Starts,
) -> tuple[Found, Starts]:
    """The search where costs are by rank or stage, and the best orders of each placement for another one to start with.

    `starts` are such orders, of a search within less memory.
    """
    sizes, kinds = _listed(ranks, microbatches, stages_per_rank, placements)
    span, caps = objective == "span", caps_of(memory, ranks)
    allowed = placements_for(ranks, costs, sizes, kinds)
    choices = stages_to_recompute if recompute and memory is not None else never
    unsplit = best_unsplit(microbatches, costs, caps, allowed, choices, span)
    try:
        problems = problems_for(ranks, microbatches, costs, memory, sizes, kinds, span, recompute)
    except NoRoom:
        if unsplit is None:
            raise
        return _found(unsplit, objective, (), budget.seconds), starts
    hunts = [Hunt(problem, kind, generator, budget) for kind, problem in problems]
    shared = Effort(hunts, budget, progress)
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
        return _found(unsplit, objective, tried, budget.seconds), {**starts, **reached}
    bound = shared.bound if unsplit is None else min(shared.bound, unsplit.bound)
    found = Found(schedule, hunt.problem.costs, objective, hunt.value, bound, tried, budget.seconds)
    return found, {**starts, **reached}


def _listed(
    ranks: int, microbatches: int, stages_per_rank: int | Iterable[int], placements: str | Iterable[str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The numbers of stages per rank and the placements to try, checked."""
    sizes = tuple(stages_per_rank) if isinstance(stages_per_rank, Iterable) else (stages_per_rank,)
    kinds = tuple(placements) if isinstance(placements, Iterable) and not isinstance(placements, str) else (placements,)
    _check(ranks, microbatches, sizes, kinds)
    return sizes, kinds


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


def _check(ranks: int, microbatches: int, sizes: tuple[int, ...], kinds: tuple[str, ...]) -> None:
    numbers = [("ranks", ranks), ("microbatches", microbatches), *(("stages_per_rank", size) for size in sizes)]
    for name, value in numbers:
        check_count(name, value)
    for kind in kinds:
        if kind not in PLACEMENTS:
            raise UsageError(f"there is no placement {kind!r} to search; known: {', '.join(PLACEMENTS)}")
    if not sizes or not kinds:
        raise UsageError("nothing to try: give at least one number of stages_per_rank and one of placements")


def _tried(hunt: Hunt) -> Tried:
    """What came of a hunt."""
    again = tuple(sorted(hunt.problem.recompute))
    return Tried(hunt.stages_per_rank, hunt.kind, hunt.value, hunt.bound, hunt.orders, again)
