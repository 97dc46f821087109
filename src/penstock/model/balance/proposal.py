"""A better cut after a run: the pieces weighed by what their stages took."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import UsageError
from penstock.model.balance.partition import counts_between, partition
from penstock.schedule.action import Op
from penstock.schedule.timing.occupied import occupied
from penstock.schedule.timing.timeline import Timeline

NO_GAIN = 1e-6


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
    cuts: tuple[int, ...]
    weights: tuple[float, ...]
    loads_before: tuple[float, ...]
    loads: tuple[float, ...]
    allowed: tuple[int, ...] | None = None

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
    """Return the median time that each stage took for forward and backward of a microbatch of a recorded run."""
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
    """Propose a better cut after a run: the pieces' weights scaled so that each stage weighs what it took."""
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
