"""Where to cut: from what the pieces of a model weigh to stages that keep no rank waiting.

A pipeline runs at the pace of its most loaded rank, so that load is what a cut minimises; a rank's
load is the sum over its stages, divided by its speed. Among equally good cuts the one that fewer
bytes cross is taken, then the evener. The search itself is in `sweep`; nothing here needs torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import UsageError
from penstock.model.balance.partition import Weights, pose
from penstock.model.balance.sweep import lightest
from penstock.schedule.action import Op
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.timing.calibrate import occupied
from penstock.schedule.timing.timeline import Timeline

NO_GAIN = 1e-6


@dataclass(frozen=True)
class Partition:
    """The cuts, what they leave on the ranks, and whether that is known to be the best there is."""

    cuts: tuple[int, ...]  # the numbers of the first pieces of stages 1, 2, ...
    loads: tuple[float, ...]  # by rank
    crossing: float
    exact: bool  # no cut has a lighter most loaded rank; else it is the best that was found

    @property
    def largest(self) -> float:
        """The load of the rank that all others wait for."""
        return max(self.loads)


def partition(
    weights: Weights,
    stages: int,
    *,
    allowed: Sequence[int] | None = None,
    crossing: Sequence[float] | None = None,
    placement: Placement | None = None,
    speeds: Sequence[float] | None = None,
    base: Sequence[float] | None = None,
    slack: float = 0.0,
) -> Partition:
    """The cut with the lightest most loaded rank: where it is, and what it leaves on the ranks.

    weights    what each piece weighs, or one row of that for each stage (`profile.memory_rows`)
    allowed    pieces before which a cut may be; without it, any
    crossing   bytes that cross a cut before each piece: decides among equals
    placement  which rank has which stage; without it, each stage has its own
    speeds     of the ranks: 0.5 takes twice as long
    base       what each stage carries anyway, such as the loss on the last one
    slack      loads within this share of the best count as equal (measured times never quite are)
    """
    problem, places = pose(weights, stages, allowed, crossing, placement, speeds, base)
    ends, exact = lightest(problem, slack)
    cuts = tuple(places[end] for end in ends[1:-1])
    return Partition(cuts, tuple(problem.loads(ends)), problem.bytes(ends), exact)


def counts_of(cuts: Sequence[int], pieces: int) -> list[int]:
    """How many pieces each stage has: what `Pipeline(balance=[...])` takes."""
    return [end - first for first, end in pairwise([0, *cuts, pieces])]


def counts_between(cuts: Sequence[int], starts: Sequence[int]) -> tuple[int, ...]:
    """As `counts_of`, where not every piece counts: those do with which a stage may begin, `starts`."""
    bounds = [0, *cuts, max((*starts, *cuts), default=0) + 1]
    return tuple(sum(first <= start < end for start in starts) for first, end in pairwise(bounds))


def in_flight(schedule: Schedule) -> list[int]:
    """By stage: the microbatches that it holds when its rank holds the most."""
    found = [0] * schedule.stages
    for rank, row in enumerate(schedule.rows):
        held = dict.fromkeys(schedule.placement.stages_of(rank), 0)
        most = 0
        for action in row:
            for part in () if action is None else action.parts():
                if part.op is Op.F:
                    held[part.stage] += 1
                    if sum(held.values()) > most:
                        most = sum(held.values())
                        for stage, number in held.items():
                            found[stage] = number
                elif part.op is Op.B or part.op is Op.W:
                    held[part.stage] -= 1
    return [1] * schedule.stages if schedule.forward_only else found


# -- from a run


@dataclass(frozen=True)
class Proposal:
    """A cut that `Pipeline.rebalance` proposes, and what it would gain. Print it to read it.

    Attributes:
        before: The present cut: the first piece of stages 1, 2, ...
        cuts: The proposed cut; the present one if nothing better was found.
        weights: The measured time of each piece.
        loads_before: The time per microbatch of each rank, now.
        loads: The time per microbatch of each rank, as predicted.
        allowed: The pieces that a stage may begin with; `None` for any.
    """

    before: tuple[int, ...]
    cuts: tuple[int, ...]  # those of before, where nothing better was found
    weights: tuple[float, ...]  # of the pieces, as measured
    loads_before: tuple[float, ...]  # of the ranks, a microbatch
    loads: tuple[float, ...]
    allowed: tuple[int, ...] | None = None  # the pieces before which a cut may be: those that count; None: any

    @property
    def gain(self) -> float:
        """How many times faster the most loaded rank gets; 1 where nothing was found."""
        return max(self.loads_before) / max(self.loads) if max(self.loads) else 1.0

    @property
    def changes(self) -> bool:
        """Whether the proposed cut differs from the present one."""
        return self.cuts != self.before

    def __str__(self) -> str:
        starts = range(len(self.weights)) if self.allowed is None else (0, *self.allowed)
        before, after = (list(counts_between(cuts, starts)) for cuts in (self.before, self.cuts))
        now = f"{before} pieces per stage, {max(self.loads_before):.4g} on the most loaded rank"
        if not self.changes:
            return f"nothing better than {now}"
        return f"{after} instead of {now}: {max(self.loads):.4g}, {self.gain:.2f} times faster"


def stage_times(timeline: Timeline) -> list[float]:
    """By stage: what forward and backward of one microbatch take, from a run (medians over the microbatches)."""
    times = {key: statistics.median(values) for key, values in occupied(timeline).items()}
    found = []
    for stage in range(timeline.schedule.stages):
        if (Op.F, stage) not in times:
            raise UsageError(f"the timeline has no forward of stage {stage}; record a whole step, on every rank")
        found.append(sum(times.get((op, stage), 0.0) for op in (Op.F, Op.B, Op.I, Op.W)))
    return found


def propose(
    weights: Sequence[float], cuts: Sequence[int], timeline: Timeline, *, allowed: Sequence[int] | None = None
) -> Proposal:
    """A better cut after a run: the pieces' weights scaled so that each stage weighs what it took."""
    placement = timeline.schedule.placement
    bounds = [0, *cuts, len(weights)]
    if len(bounds) != placement.stages + 1 or any(first >= end for first, end in pairwise(bounds)):
        raise UsageError(
            f"cuts {list(cuts)} of {len(weights)} pieces make {len(bounds) - 1} stages; the timeline is of "
            f"{placement.stages}, each with at least 1 piece"
        )
    places = None if allowed is None else tuple(allowed)
    times = stage_times(timeline)
    measured: list[float] = []
    before = [0.0] * placement.ranks
    for stage, (first, end) in enumerate(pairwise(bounds)):
        before[placement.rank_of(stage)] += times[stage]
        pieces = weights[first:end] if sum(weights[first:end]) > 0 else [1.0] * (end - first)
        scale = times[stage] / sum(pieces)
        measured += [weight * scale for weight in pieces]
    found = partition(measured, placement.stages, allowed=allowed, placement=placement)
    if found.largest >= max(before) * (1 - NO_GAIN):
        return Proposal(tuple(cuts), tuple(cuts), tuple(measured), tuple(before), tuple(before), places)
    return Proposal(tuple(cuts), found.cuts, tuple(measured), tuple(before), found.loads, places)
