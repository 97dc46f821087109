"""The search over placements: how many stages a rank, in a loop or in a V, and in which order.

`search` returns the schedule; `search_report` says what was tried beside it, and how far the
answer is from a bound that nothing can beat. Both take costs and memory *per rank*, because
that is what stays the same when the number of stages a rank is open: with v stages a rank each
takes 1 / v of the time and holds 1 / v of the memory, while a hop costs what it costs. Costs
given stage by stage say how many stages there are, and only that number is tried.

More time only makes the answer better. `seconds` are of this thread's own computing, so that a
busy machine does not make the answer worse. With `seconds=0` the families and, on pipelines
that are not large, a few rules are tried and nothing depends on the clock.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from penstock.errors import UsageError
from penstock.schedule.bounds import caps_of
from penstock.schedule.costs import Costs
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.search.evaluate import complete
from penstock.schedule.search.hunt import Hunt
from penstock.schedule.search.problem import ROUNDING, SHARED, Problem, stage_costs
from penstock.schedule.simulate import simulate
from penstock.schedule.timeline import Timeline

__all__ = ["Found", "Progress", "Tried", "search", "search_report"]

PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {"loop": Placement.loop, "v": Placement.v}
Progress = Callable[[float, float, float], None]  # seconds so far, the best value so far, the lower bound
Objective = Literal["makespan", "span"]


@dataclass(frozen=True)
class Tried:
    """What came out for one number of stages a rank and one placement."""

    stages_per_rank: int
    placement: str
    value: float  # the objective of the best order; infinite where none fits
    lower_bound: float
    orders: int  # how many were priced
    recompute: tuple[int, ...] = ()  # the stages that run their forward again


@dataclass(frozen=True)
class Found:
    """The best schedule found, and how good it is."""

    schedule: Schedule
    costs: Costs  # of one stage, as `simulate` takes them
    objective: str
    value: float  # the makespan, or the longest span
    lower_bound: float  # of all that was allowed: every number of stages a rank, every placement
    tried: tuple[Tried, ...]
    seconds: float

    @property
    def gap(self) -> float:
        """How far the value is above the lower bound, as a share of it; 0 is proved best."""
        return max(0.0, self.value / self.lower_bound - 1) if self.lower_bound else 0.0

    @property
    def proved(self) -> bool:
        """Nothing can be better."""
        return self.value <= self.lower_bound * (1 + ROUNDING)

    @property
    def chosen(self) -> Tried:
        """The entry of `tried` that the schedule is of."""
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
        """From the first start to the last end."""
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
    objective: Objective = "makespan",
    recompute: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Schedule:
    """The best schedule found within about `seconds`; never worse than any family that fits into `memory`.

    costs      of a whole rank: with v stages a rank each takes 1/v. Given stage by stage, only the number of
               stages that they are for is tried
    memory     the cap on a rank's peak memory, one number or one for each rank, in the unit of `costs.activation`:
               microbatches of a whole rank where that is 1. What F takes is held until I, `costs.held` until W
    objective  "makespan", or "span" for the longest time from a rank's own first start to its own end
    recompute  also try to run the forwards of some or all stages again in their backwards, which then keep only
               `costs.kept` until there; the schedule's `recompute` names these stages
    progress   called with (seconds so far, best value so far, lower bound)
    """
    return search_report(
        ranks,
        microbatches,
        costs,
        memory,
        stages_per_rank,
        placements,
        seconds=seconds,
        objective=objective,
        recompute=recompute,
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
    objective: Objective = "makespan",
    recompute: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Found:
    """As `search`, with what was tried, the lower bound and the gap to it."""
    if not seconds >= 0:
        raise UsageError(f"seconds must be 0 or more, got {seconds}")
    if objective not in ("makespan", "span"):
        raise UsageError(f"the objective is makespan or span, got {objective!r}")
    begin = time.thread_time()
    sizes = (stages_per_rank,) if isinstance(stages_per_rank, int) else tuple(stages_per_rank)
    kinds = (placements,) if isinstance(placements, str) else tuple(placements)
    _check(ranks, microbatches, sizes, kinds)
    problems = _problems(ranks, microbatches, costs or Costs(), memory, sizes, kinds, objective == "span", recompute)
    generator = random.Random(seed)
    effort = _Effort([Hunt(problem, kind, generator) for kind, problem in problems], begin, seconds, progress)
    with _uncollected():
        hunt = effort.run(generator)
        schedule = hunt.problem.schedule(complete(hunt.problem, hunt.best[0]), "auto")
    return Found(
        schedule,
        hunt.problem.costs,
        objective,
        hunt.value,
        effort.bound,
        tuple(_tried(hunt) for hunt in effort.hunts),
        time.thread_time() - begin,
    )


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
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")
    for kind in kinds:
        if kind not in PLACEMENTS:
            raise UsageError(f"there is no placement {kind!r} to search; known: {', '.join(PLACEMENTS)}")
    if not sizes or not kinds:
        raise UsageError("nothing to try: give at least one number of stages_per_rank and one of placements")


def _problems(
    ranks: int,
    microbatches: int,
    costs: Costs,
    memory: float | Sequence[float] | None,
    sizes: tuple[int, ...],
    kinds: tuple[str, ...],
    span: bool,
    recompute: bool,
) -> list[tuple[str, Problem]]:
    """Each placement once, fewest stages first; refused when none can hold even one microbatch."""
    caps = caps_of(memory, ranks)
    given = {len(value) for name in SHARED if isinstance(value := getattr(costs, name), tuple)}
    if isinstance(costs.bytes, Sequence):
        given.add(len(costs.bytes))
    fitting = [size for size in sorted(set(sizes)) if given <= {ranks * size}]
    if not fitting:
        raise UsageError(
            f"the costs are for {' and '.join(map(str, sorted(given)))} stages, but {ranks} ranks with "
            f"{' or '.join(map(str, sorted(set(sizes))))} stages each have "
            f"{' or '.join(str(ranks * size) for size in sorted(set(sizes)))}; give one number for a whole rank, "
            "or costs for that many stages"
        )
    found: list[tuple[str, Problem]] = []
    least, where = float("inf"), 0
    for size in fitting:
        for kind in kinds:
            placement = PLACEMENTS[kind](ranks, size)
            if any(problem.placement == placement for _, problem in found):
                continue
            for again in _choices(placement) if recompute and memory is not None else [frozenset[int]()]:
                problem = Problem(placement, microbatches, stage_costs(costs, size), caps, span=span, recompute=again)
                short = [rank for rank in range(ranks) if problem.least_memory(rank) > problem.caps[rank]]
                if not short:
                    found.append((kind, problem))
                elif problem.least_memory(short[0]) < least:
                    least, where = problem.least_memory(short[0]), short[0]
    if not found:
        other = "" if recompute else ", recompute=True,"
        raise UsageError(
            f"memory {caps[where]:g} is too little for rank {where}: one microbatch alone holds {least:g} there; "
            f"give at least that much{other} or cut the model for more ranks"
        )
    return found


def _choices(placement: Placement) -> list[frozenset[int]]:
    """Which stages to recompute: none; those of the first ranks or the first of each rank, which wait longest; all."""
    ranks, size = placement.ranks, placement.stages_per_rank
    owned = [placement.stages_of(rank) for rank in range(ranks)]
    first_ranks = [owned[: ranks * quarters // 4] for quarters in (1, 2, 3)]
    first_of_each = [[stages[:count] for stages in owned] for count in range(1, size)]
    sets = [frozenset(stage for stages in chosen for stage in stages) for chosen in [*first_ranks, *first_of_each]]
    return list(dict.fromkeys([frozenset[int](), *sets, frozenset(range(placement.stages))]))


def _tried(hunt: Hunt) -> Tried:
    """What came of a hunt."""
    again = tuple(sorted(hunt.problem.recompute))
    return Tried(hunt.stages_per_rank, hunt.kind, hunt.value, hunt.bound, hunt.orders, again)


class _Effort:
    """The time there is, and the placements that share it."""

    def __init__(self, hunts: list[Hunt], begin: float, seconds: float, progress: Progress | None) -> None:
        self.hunts, self.begin, self.seconds, self.progress = hunts, begin, seconds, progress
        self.bound = min(hunt.bound for hunt in hunts)
        self.open = hunts

    @property
    def best(self) -> Hunt:
        """The placement that leads; of equals, the one with the fewest stages."""
        leader = self.hunts[0]
        for hunt in self.hunts[1:]:
            if hunt.value < leader.value * (1 - ROUNDING):
                leader = hunt
        return leader

    def run(self, generator: random.Random) -> Hunt:
        """Search until the time is up or nothing can be better."""
        promising = sorted(self.hunts, key=lambda hunt: hunt.bound)
        for hunt in promising:  # a promise, so whatever the time: never worse than any family
            if hunt.bound < self.best.value * (1 - ROUNDING):
                for _ in hunt.families(lambda: self.best.value):
                    self._tell()
        for hunt in promising:
            for _ in hunt.rules() if self._worth(hunt) else ():
                self._tell()
                if not self._worth(hunt):
                    break
        while self.seconds and self._narrow():
            leaders = sorted(self.open, key=lambda hunt: hunt.value)
            hunt = leaders[min(int(generator.expovariate(0.7)), len(leaders) - 1)]
            hunt.step(self.begin + self.seconds)
            self._tell()
        return self.best

    def _worth(self, hunt: Hunt) -> bool:
        """Are the first rules worth their time here? Where there is no answer yet, always."""
        best = self.best.value
        if best == math.inf:
            return True
        if hunt.bound >= best * (1 - ROUNDING):
            return False
        return hunt.step_seconds < self._left() if self.seconds else not hunt.large

    def _left(self) -> float:
        return self.seconds - (time.thread_time() - self.begin)

    def _narrow(self) -> bool:
        """Leave out the placements that cannot win any more, and those too large for the time left."""
        value, left = self.best.value, self._left()
        self.open = [hunt for hunt in self.hunts if hunt.bound < value * (1 - ROUNDING) and hunt.step_seconds < left]
        return left > 0 and bool(self.open)

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(time.thread_time() - self.begin, self.best.value, self.bound)
