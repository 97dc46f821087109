"""One way to run a layout, priced: its schedule simulated, its memory added up.

Many ways are compared, so two things are known before a simulation: a time that the way cannot beat, and its memory,
which follows from the order of actions alone. Long pipelines are looked at with a few rounds of microbatches; what one
more round takes is then known, and the rest follows. What tells families apart is read from small schedules of theirs,
so that a new family is planned like the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import TypeVar

from penstock.planner.layout import MeshLayout
from penstock.planner.price import Pricing, StageCosts
from penstock.schedule import FAMILIES, Costs, Op, Placement, Schedule, build, family, simulate
from penstock.schedule.timing.simulate import peak_memory, peaks_with_gradients
from penstock.tools.train.run.memory import Memory

# After so many rounds of as many microbatches as ranks, and so many at least, a schedule repeats itself.
ROUNDS, FEWEST = 3, 16
SMALL, SURE = 8, 0.8  # Ranks of a schedule that tells what longer ones hold; the share of it that is counted on.
Found = TypeVar("Found")


def _ops_of(schedule: Schedule) -> frozenset[Op]:
    return frozenset(op for op in Op if (schedule.columns.op == op).any())


@cache
def _ops(name: str) -> frozenset[Op]:
    return _ops_of(build(name, 2, 2))


def splits_backward(name: str) -> bool:
    """Return whether a family has its backwards as I and W."""
    return Op.I in _ops(name)


def families_for(ranks: int, stages_per_rank: int, wanted: Sequence[str]) -> list[str]:
    """Return the families among those wanted that train with so many stages per rank."""
    if ranks == 1:
        return ["1f1b"]
    takes = {"block": stages_per_rank == 1, "v": stages_per_rank == 2, "loop": stages_per_rank > 1}
    return [name for name in wanted if takes[family(name).layout] and _ops(name) & {Op.B, Op.W}]


@dataclass(frozen=True)
class PlanCandidate:
    """A layout with the rest of what a run has to choose."""

    pricing: Pricing
    family: str  # A family's name, or "searched".
    stages_per_rank: int
    microbatches: int
    recompute: bool
    cuts: tuple[int, ...]  # The units that stages 1, 2, ... begin with.
    states: float  # Numbers that the optimizer keeps per parameter.
    searched: Schedule | None = None  # A schedule that no family has.
    accumulated: bool = False  # Several passes add up gradients: each keeps a copy of what it found.

    @property
    def layout(self) -> MeshLayout:
        return self.pricing.layout

    @property
    def split(self) -> bool:
        """Whether backwards are I and W."""
        return splits_backward(self.family) if self.searched is None else Op.I in _ops_of(self.searched)

    @property
    def stages(self) -> list[StageCosts]:
        return self.pricing.stages(self.cuts, self.split)

    @property
    def own(self) -> list[list[StageCosts]]:
        """The stages of each rank."""
        return self._once("own", self._own)

    def _own(self) -> list[list[StageCosts]]:
        stages, searched = self.stages, self.searched
        placement = (
            _placement(self.family, self.layout.pp, self.stages_per_rank) if searched is None else searched.placement
        )
        return [[stages[stage] for stage in placement.stages_of(rank)] for rank in range(self.layout.pp)]

    def _once(self, what: str, find: Callable[[], Found]) -> Found:
        """Find a figure once for all families with the same stages on each rank, and the same backwards."""
        if self.searched is not None:
            return find()
        kind = self.family if what == "bound" else (FAMILIES[self.family].layout, self.split)
        key = what, self.cuts, kind, self.recompute
        if key not in self.pricing.shared:
            self.pricing.shared[key] = find()
        found: Found = self.pricing.shared[key]
        return found

    @property
    def is_measured(self) -> bool:
        """Whether its times were measured; otherwise they are counted."""
        return self.pricing.measured(self.cuts, self.split) is not None

    @property
    def around(self) -> tuple[float, float]:
        """Seconds after the pipeline: what is left of the reduction, and the optimizer; on the slowest rank."""
        return self._once("around", self._around)

    def _around(self) -> tuple[float, float]:
        known = self.pricing.measured(self.cuts, self.split)
        if known is not None:
            return 0.0, known.around
        found = [self.pricing.after(own, self.microbatches) for own in _different(self.own)]
        return max(each[0] for each in found), max(each[1] for each in found)

    @cached_property
    def costs(self) -> Costs:
        """For the simulator."""
        known = self.pricing.measured(self.cuts, self.split)
        priced = self.pricing.costs(self.stages, self.recompute)
        if known is None:
            return priced
        return replace(priced, latency=0.0, bandwidth=None, bytes=0.0, hop=known.costs.hop)  # It was measured.

    @property
    def bound(self) -> float:
        """Seconds that a step takes at least: the work of each rank, and the way of the first microbatch to it."""
        return self._once("bound", self._bound)

    def _bound(self) -> float:
        most = fill = 0.0
        for own in self.own:
            again = [each.again if self.recompute else 0.0 for each in own]
            work = sum(each.forward + each.input + each.weight for each in own) + sum(again)
            most = max(most, fill + self.microbatches * work)
            first = own[0]
            fill += first.forward + (0.0 if self.split else first.input + first.weight + again[0])
        if self.searched is None and (cap := FAMILIES[self.family].cap) is not None:
            most = max(most, self._warm_up(cap(self.layout.pp, self.stages_per_rank)))
        return most + sum(self.around)

    def _warm_up(self, cap: int) -> float:
        """Bound the seconds of the first rank from below, if it holds no more than `cap` microbatch-stages.

        A stage's first gradient comes when a microbatch has been through all stages and back. Until then the rank gives
        back nothing of that stage and of those before it, so no more than `cap` forwards of these have run, and what
        its later stages did was for these microbatches. All other work is still to do.
        """
        stages, found, later, behind = self.stages, 0.0, 0.0, 0.0
        again = [each.again if self.recompute else 0.0 for each in stages]
        own = _placement(self.family, self.layout.pp, self.stages_per_rank).stages_of(0)
        work = {each: stages[each].forward + stages[each].input + stages[each].weight + again[each] for each in own}
        forward = sum(each.forward for each in stages)
        for number in reversed(range(len(stages))):
            if number in work:
                until = [stages[each].forward for each in own if each < number]
                done = cap * max([*until, stages[number].forward + later])
                done = min(done, self.microbatches * (sum(until) + stages[number].forward + later))
                found = max(found, forward + behind + self.microbatches * sum(work.values()) - done)
                later += work[number]
            behind += stages[number].input + again[number]
        return found

    @cached_property
    def peaks(self) -> list[tuple[float, float]]:
        """Bytes of each rank at its peak: of activations, and of activations and gradients at one time."""
        if self.searched is None:
            sizes = self.layout.pp, self.microbatches, self.stages_per_rank
            peaks = _peaks(self.family, *sizes, self.costs, *self._gradients)
        else:
            peaks = peaks_with_gradients(self.searched, self.costs, *self._gradients)
        extra = map(self._extra, self.own)
        found = [(alone + more, both + more) for (alone, both), more in zip(peaks, extra, strict=True)]
        if not self.accumulated:
            return found
        whole = [sum(map(self.pricing.gradient_bytes, own)) for own in self.own]
        return [(alone + gradients, alone + 2 * gradients) for (alone, _), gradients in zip(found, whole, strict=True)]

    @property
    def _gradients(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Bytes of the gradients of each stage, and what a first backward needs beside."""
        return tuple(map(self.pricing.gradient_bytes, self.stages)), tuple(each.early for each in self.stages)

    @cached_property
    def memory(self) -> tuple[Memory, ...]:
        """What each rank holds."""
        return tuple(
            self.pricing.memory(own, alone, self.states, both)
            for own, (alone, both) in zip(self.own, self.peaks, strict=True)
        )

    @property
    def fullest(self) -> Memory:
        """The memory of the fullest rank."""
        return max(self.memory, key=lambda each: each.process)

    @property
    def least_bytes(self) -> float:
        """What the fullest rank holds at least: with the activations of one stage, whatever the schedule."""
        return self._once("least", self._least_bytes)

    def _least_bytes(self) -> float:
        found = 0.0
        for own in _different(self.own):
            kept, extra = max(each.kept if self.recompute else each.saved for each in own), self._extra(own)
            together = max(kept, sum(map(self.pricing.gradient_bytes, own))) + extra
            found = max(found, self.pricing.memory(own, kept + extra, self.states, together).process)
        return found

    def _extra(self, own: Sequence[StageCosts]) -> float:
        """Count bytes that a rank needs for a moment, in addition to what its schedule holds."""
        return max(each.extra + (each.burst if self.recompute else 0.0) for each in own)

    def needs_more_than(self, room: float) -> float:
        """Return how many bytes the first rank needs beyond `room`, nearly at least, and 0 where that is not sure.

        It is found out on a schedule of a few ranks, which is cheaper than its own.
        """
        ranks = self.layout.pp
        if ranks <= SMALL:
            return 0.0
        own = self.own[0]
        flight = min(self.microbatches - 1, SURE * _in_flight(self.family, min(3, self.stages_per_rank)) * ranks)
        kept = flight * sum(each.kept if self.recompute else each.saved for each in own)
        return max(0.0, self.pricing.memory(own, kept + self._extra(own), self.states).process - room)

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.priced[0] + sum(self.around)

    @cached_property
    def priced(self) -> tuple[float, float]:
        """Seconds from the first action to the last, and the share of them that ranks wait; simulated."""
        if self.searched is not None:
            timeline = simulate(self.searched, self.costs)
            return timeline.makespan, timeline.bubble
        return _simulated(self.family, self.layout.pp, self.microbatches, self.stages_per_rank, self.costs)

    def schedule(self) -> Schedule:
        """Return the schedule that is run."""
        return self.searched or _schedule(self.family, self.layout.pp, self.microbatches, self.stages_per_rank)


def _different(owned: list[list[StageCosts]]) -> list[list[StageCosts]]:
    """Return the ranks of which no other has the very same stages."""
    return list({tuple(map(id, own)): own for own in owned}.values())


@cache
def _placement(name: str, ranks: int, stages_per_rank: int) -> Placement:
    return FAMILIES[name].placed(ranks, stages_per_rank)


@lru_cache(maxsize=512)
def _schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    return build(name, ranks, microbatches, stages_per_rank)


@cache
def default_families() -> tuple[str, ...]:
    """Return the families that train, but those that another one of the same kind beats in both time and memory."""
    found = {}
    for name, entry in FAMILIES.items():
        if _ops(name) & {Op.B, Op.W}:
            per_rank = entry.stages_per_rank
            one = 1 / per_rank
            costs = Costs(one, one, one, activation=one, held=0.5 * one)
            timeline = simulate(_schedule(name, SMALL, ROUNDS * SMALL, per_rank), costs)
            kind = entry.layout, splits_backward(name)
            found[name] = kind, round(timeline.makespan, 9), round(max(timeline.peak_memory), 9)
    return tuple(
        name
        for name, (kind, time, memory) in found.items()
        if not any(
            kind == other[0] and other[1] <= time and other[2] <= memory and other[1:] != (time, memory)
            for other in found.values()
        )
    )


@cache
def _in_flight(name: str, stages_per_rank: int) -> float:
    """Count what the first of a few ranks holds between forward and backward: microbatches, as a share of the ranks."""
    costs = Costs(activation=1 / stages_per_rank / SMALL, held=0.0)
    return peak_memory(_schedule(name, SMALL, ROUNDS * SMALL, stages_per_rank), costs)[0]


@cache
def _grows(name: str) -> bool:
    """Return whether a family holds more the more microbatches there are, however many."""
    peaks = [max(peak_memory(_schedule(name, SMALL, rounds * SMALL, 2), Costs(held=0.5))) for rounds in (3, 4)]
    return peaks[0] != peaks[1]


def _few(ranks: int, microbatches: int) -> tuple[int, ...]:
    """Choose how many microbatches are looked at: all, or two numbers of them that are one round apart."""
    few = max(ROUNDS * ranks, FEWEST)
    if microbatches <= few + ranks:
        return (microbatches,)
    small = few - (few - microbatches) % ranks
    return small - ranks, small


@lru_cache(maxsize=4096)
def _peaks(
    name: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int,
    costs: Costs,
    gradients: tuple[float, ...],
    early: tuple[float, ...],
) -> list[tuple[float, float]]:
    """Find the peak memory of each rank of a family's schedule: of activations, and of these and gradients at once."""
    counts = _few(ranks, microbatches)
    if not _grows(name):
        counts = counts[:1]
    schedules = [_schedule(name, ranks, count, stages_per_rank) for count in counts]
    found = [peaks_with_gradients(each, costs, gradients, early) for each in schedules]
    rounds = (microbatches - counts[-1]) / ranks

    def further(before: float, last: float) -> float:
        return last + rounds * (last - before)

    return [(further(a[0], b[0]), further(a[1], b[1])) for a, b in zip(found[0], found[-1], strict=True)]


@lru_cache(maxsize=4096)
def _simulated(name: str, ranks: int, microbatches: int, stages_per_rank: int, costs: Costs) -> tuple[float, float]:
    """Find the makespan and the idle share of a family's schedule with so many microbatches."""
    counts = _few(ranks, microbatches)
    found = [simulate(_schedule(name, ranks, count, stages_per_rank), costs) for count in counts]
    last, rounds = found[-1], (microbatches - counts[-1]) / ranks
    makespan = last.makespan + rounds * (last.makespan - found[0].makespan)
    busy = (1 - last.bubble) * last.makespan * microbatches / counts[-1]
    return makespan, max(0.0, 1 - busy / makespan)
