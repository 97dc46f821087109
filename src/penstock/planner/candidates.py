"""One way to run a layout, priced: its schedule simulated, its memory added up.

Many ways are compared, so two things are known before a simulation: a time that the way cannot beat, and bytes that it
cannot do with less than. Long pipelines are simulated with fewer microbatches of the same number per round; what one
more of them takes is then known, and the rest follows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from penstock.planner.layout import Layout
from penstock.planner.price import Memory, Pricing, StageCosts
from penstock.schedule import Costs, Placement, Schedule, build, family, simulate

MOST = 6_000  # computes that are simulated
SPLIT = ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "interleaved-zb", "group-interleaved")  # backwards as I and W
SINGLE = ("1f1b", "zb-h1", "zb-h2", "gpipe")  # one stage per rank
DOUBLE = ("zb-v", "v-half", "v-min")  # two, down and up again
SEVERAL = ("interleaved-1f1b", "interleaved-zb", "looped-bfs")
HELD = {"v-half": 0.5, "v-min": 0.33, "zb-h2": 1.0}  # microbatches in flight on a rank, of the ranks that there are


@dataclass(frozen=True)
class Candidate:
    """A layout with the rest of what a run has to choose."""

    pricing: Pricing
    family: str
    stages_per_rank: int
    microbatches: int
    recompute: bool
    cuts: tuple[int, ...]
    states: float  # numbers that the optimizer keeps per parameter

    @property
    def layout(self) -> Layout:
        return self.pricing.layout

    @cached_property
    def stages(self) -> list[StageCosts]:
        return self.pricing.stages(self.cuts, self.family in SPLIT)

    @property
    def placement(self) -> Placement:
        return family(self.family).placed(self.layout.pp, self.stages_per_rank)

    @cached_property
    def own(self) -> list[list[StageCosts]]:
        """The stages of each rank."""
        placement = self.placement
        return [[self.stages[stage] for stage in placement.stages_of(rank)] for rank in range(self.layout.pp)]

    @cached_property
    def around(self) -> tuple[float, float]:
        """Seconds after the pipeline: what is left of the reduction, and the optimizer; on the slowest rank."""
        known = self.pricing.measured(self.cuts, self.family in SPLIT)
        if known is not None:
            return 0.0, known.around
        found = [self.pricing.after(own, self.microbatches) for own in self.own]
        return max(each[0] for each in found), max(each[1] for each in found)

    @cached_property
    def costs(self) -> Costs:
        """For the simulator."""
        known = self.pricing.measured(self.cuts, self.family in SPLIT)
        priced = self.pricing.costs(self.stages, self.recompute)
        if known is None:
            return priced
        return replace(priced, latency=0.0, bandwidth=None, bytes=0.0, hop=known.costs.hop)  # as it was measured

    @cached_property
    def bound(self) -> float:
        """Seconds that a step takes at least: the work of each rank, and the way of the first microbatch to it."""
        most = fill = 0.0
        for own in self.own:
            again = [each.again if self.recompute else 0.0 for each in own]
            work = sum(each.forward + each.input + each.weight for each in own) + sum(again)
            most = max(most, fill + self.microbatches * work)
            first = own[0]
            fill += first.forward + (0.0 if self.family in SPLIT else first.input + first.weight + again[0])
        return most + sum(self.around)

    @cached_property
    def least_memory(self) -> Memory:
        """What the fullest rank holds at least."""
        share = HELD.get(self.family, 1.0)
        rows = []
        for rank, own in enumerate(self.own):
            flight = min(self.microbatches, max(1.0, share * (self.layout.pp - (0 if share < 1 else rank))))
            kept = sum(each.kept if self.recompute else each.saved for each in own)
            rows.append(self.pricing.memory(own, flight * kept, self.states))
        return max(rows, key=lambda each: each.total)

    @cached_property
    def priced(self) -> Priced:
        """Simulated."""
        return _priced(self)

    def schedule(self) -> Schedule:
        """The schedule that is run."""
        return _schedule(self.family, self.layout.pp, self.microbatches, self.stages_per_rank)


@dataclass(frozen=True)
class Priced:
    """What a simulation says of a candidate."""

    makespan: float
    idle: float
    activations: tuple[float, ...]  # by rank
    memory: tuple[Memory, ...]


@lru_cache(maxsize=512)
def _schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    return build(name, ranks, microbatches, stages_per_rank)


@lru_cache(maxsize=4096)
def simulated(
    name: str, ranks: int, microbatches: int, stages_per_rank: int, costs: Costs
) -> tuple[float, float, tuple[float, ...]]:
    """(makespan, idle share, peak memory by rank) of a family's schedule with so many microbatches."""
    few = max(MOST // (ranks * stages_per_rank), 3 * ranks)
    if microbatches <= few + ranks:
        timeline = simulate(_schedule(name, ranks, microbatches, stages_per_rank), costs)
        return timeline.makespan, timeline.bubble, timeline.peak_memory
    small = few - (few - microbatches) % ranks
    one, two = (simulate(_schedule(name, ranks, count, stages_per_rank), costs) for count in (small - ranks, small))
    rounds = (microbatches - small) / ranks
    makespan = two.makespan + rounds * (two.makespan - one.makespan)
    busy = (1 - two.bubble) * two.makespan * microbatches / small
    peaks = tuple(b + rounds * (b - a) for a, b in zip(one.peak_memory, two.peak_memory, strict=True))
    return makespan, 1 - busy / makespan, peaks


def _priced(candidate: Candidate) -> Priced:
    costs = candidate.costs
    makespan, idle, peaks = simulated(
        candidate.family, candidate.layout.pp, candidate.microbatches, candidate.stages_per_rank, costs
    )
    activations = tuple(
        peak + max(each.extra + (each.burst if candidate.recompute else 0.0) for each in own)
        for peak, own in zip(peaks, candidate.own, strict=True)
    )
    memory = tuple(
        candidate.pricing.memory(own, held, candidate.states)
        for own, held in zip(candidate.own, activations, strict=True)
    )
    return Priced(makespan, idle, activations, memory)
