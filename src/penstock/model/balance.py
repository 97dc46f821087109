"""Where to cut: from what the pieces of a model weigh to stages that keep no rank waiting.

A pipeline runs at the pace of its most loaded rank, so that load is what a cut minimises; a rank's
load is the sum over its stages, divided by its speed. Among equally good cuts the one that fewer
bytes cross is taken, then the evener. The search itself is in `partition`; nothing here needs torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from penstock.errors import ModelError, UsageError
from penstock.model.partition import Problem, classic
from penstock.model.several import lightest
from penstock.schedule.action import Op
from penstock.schedule.calibrate import occupied
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.timeline import Timeline

__all__ = ["Proposal", "best_cuts", "counts_of", "in_flight", "measured_speeds", "partition", "propose", "stage_times"]

Weights = Sequence[float] | Sequence[Sequence[float]]  # a number a piece; or for each stage a row of them
NO_GAIN = 1e-6


@dataclass(frozen=True)
class Partition:
    """The cuts, what they leave on the ranks, and whether that is known to be the best there is."""

    cuts: tuple[int, ...]
    loads: tuple[float, ...]  # by rank
    crossing: float
    exact: bool  # no cut has a lighter most loaded rank; else it is the best that was found

    @property
    def largest(self) -> float:
        """The load of the rank that all others wait for."""
        return max(self.loads)


def best_cuts(
    weights: Weights,
    stages: int,
    *,
    allowed: Sequence[int] | None = None,
    crossing: Sequence[float] | None = None,
    placement: Placement | None = None,
    speeds: Sequence[float] | None = None,
    fixed: Iterable[int] = (),
    base: Sequence[float] | None = None,
    slack: float = 0.0,
) -> list[int]:
    """The numbers of the first pieces of stages 1, 2, ...: the cut with the lightest most loaded rank.

    weights    what each piece weighs, or one row of that for each stage (`profile.memory_rows`)
    allowed    pieces before which a cut may be; without it, any
    crossing   bytes that cross a cut before each piece: decides among equals
    placement  which rank has which stage; without it, each stage has its own
    speeds     of the ranks: 0.5 takes twice as long
    fixed      pieces before which a cut must be
    base       what each stage carries anyway, such as the loss on the last one
    slack      loads within this share of the best count as equal (measured times never quite are)
    """
    found = partition(
        weights,
        stages,
        allowed=allowed,
        crossing=crossing,
        placement=placement,
        speeds=speeds,
        fixed=fixed,
        base=base,
        slack=slack,
    )
    return list(found.cuts)


def partition(
    weights: Weights,
    stages: int,
    *,
    allowed: Sequence[int] | None = None,
    crossing: Sequence[float] | None = None,
    placement: Placement | None = None,
    speeds: Sequence[float] | None = None,
    fixed: Iterable[int] = (),
    base: Sequence[float] | None = None,
    slack: float = 0.0,
) -> Partition:
    """`best_cuts` with the loads of the ranks, the bytes that cross, and whether it is proved to be the best."""
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise UsageError(f"stages={stages!r}: a model has at least 1 stage")
    rows = _rows(weights, stages)
    count = len(rows[0])
    placement = placement or Placement(range(stages))
    if placement.stages != stages:
        raise UsageError(f"the placement {placement} is for {placement.stages} stages, not {stages}")
    speeds = _speeds(speeds, placement.ranks)
    must = sorted(set(fixed))
    places = [0, *_places(count, stages, allowed, must), count]
    if crossing is not None and len(crossing) < count:
        raise UsageError(f"crossing has {len(crossing)} entries for {count} pieces; pass the bytes before each piece")
    base = [0.0] * stages if base is None else base
    if len(base) != stages:
        raise UsageError(f"base has {len(base)} entries for {stages} stages")
    carried = [sum(base[stage] for stage in placement.stages_of(r)) / speeds[r] for r in range(placement.ranks)]
    problem = Problem(
        sums=_sums(rows, placement, speeds, places),
        ranks=placement.by_stage,
        base=tuple(carried),
        speeds=tuple(speeds),
        crossing=tuple(0.0 if crossing is None or place in (0, count) else float(crossing[place]) for place in places),
        walls=_walls(places, must),
        grain=_grain([*rows, carried], speeds),
    )
    ends, exact = (classic(problem, slack), True) if problem.single else lightest(problem, slack) or (None, True)
    if ends is None:
        raise ModelError(f"{stages} stages cannot have cuts before all of the pieces {must}; pass fewer fixed cuts")
    cuts = tuple(places[end] for end in ends[1:-1])
    return Partition(cuts, tuple(problem.loads(ends)), problem.bytes(ends), exact)


def _grain(rows: Sequence[Sequence[float]], speeds: Sequence[float]) -> float:
    """What every load is a multiple of, where weights are whole numbers."""
    if set(speeds) != {1.0} or not all(weight.is_integer() for row in rows for weight in row):
        return 0.0
    return float(math.gcd(*(int(weight) for row in rows for weight in row)))


def _rows(weights: Weights, stages: int) -> list[list[float]]:
    """For each stage what each piece weighs there; one list for all where that is the same."""
    if not weights:
        raise ModelError(f"there are no pieces to make {stages} stages of; the model has no units")
    rows: list[list[float]] = []
    made: dict[int, list[float]] = {}
    for row in weights if isinstance(weights[0], Sequence) else [weights]:
        assert isinstance(row, Sequence)
        rows.append(made.setdefault(id(row), [float(weight) for weight in row]))  # type: ignore[arg-type]
    if len(rows) == 1:
        rows *= stages
    if len(rows) != stages or len({len(row) for row in rows}) != 1:
        raise UsageError(f"weights has {len(rows)} rows of {[len(row) for row in rows]} pieces for {stages} stages")
    for row in rows:
        bad = [number for number, weight in enumerate(row) if not (weight >= 0 and math.isfinite(weight))]
        if bad:
            raise UsageError(f"piece {bad[0]} weighs {row[bad[0]]}; weights are finite and at least 0")
    return rows


def _speeds(speeds: Sequence[float] | None, ranks: int) -> list[float]:
    if speeds is None:
        return [1.0] * ranks
    if len(speeds) != ranks:
        raise UsageError(f"speeds={list(speeds)} has {len(speeds)} entries for {ranks} ranks; pass one for each rank")
    if any(not (speed > 0 and math.isfinite(speed)) for speed in speeds):
        raise UsageError(f"speeds={list(speeds)}: each is above 0; 0.5 takes twice as long as 1")
    return [float(speed) for speed in speeds]


def _places(count: int, stages: int, allowed: Sequence[int] | None, must: Sequence[int]) -> list[int]:
    """Where a cut may be, in order."""
    inner = sorted({place for place in (range(1, count) if allowed is None else allowed) if 0 < place < count})
    strange = [place for place in must if place not in set(inner)]
    if strange:
        raise ModelError(
            f"a cut before piece {strange[0]} is asked for, but cuts can be before {_short(inner)} of {count} pieces"
        )
    if len(inner) < stages - 1:
        pieces = f"{count} pieces" if len(inner) == count - 1 else f"{count} pieces with {len(inner)} places to cut"
        raise ModelError(f"{pieces} cannot make {stages} stages; pass stages={len(inner) + 1} or fewer")
    if len(must) > stages - 1:
        raise ModelError(
            f"{len(must)} fixed cuts make {len(must) + 1} stages, more than {stages}; pass stages={len(must) + 1} or more"
        )
    return inner


def _short(places: Sequence[int]) -> str:
    text = ", ".join(map(str, places[:8]))
    return f"{text}, ..." if len(places) > 8 else text or "none"


def _sums(
    rows: list[list[float]], placement: Placement, speeds: Sequence[float], places: Sequence[int]
) -> tuple[list[float], ...]:
    """By stage, the running load at each place; stages that weigh alike share one list."""
    made: dict[tuple[int, float], list[float]] = {}
    for stage, row in enumerate(rows):
        speed = speeds[placement.rank_of(stage)]
        if (id(row), speed) not in made:
            running = [0.0, *accumulate(weight / speed for weight in row)]
            made[id(row), speed] = [running[place] for place in places]
    return tuple(made[id(row), speeds[placement.rank_of(stage)]] for stage, row in enumerate(rows))


def _walls(places: Sequence[int], must: Sequence[int]) -> tuple[int, ...]:
    """For each place the next one at which a cut must be, as numbers of places."""
    walls = [len(places) - 1] * len(places)
    for number in reversed(range(len(places) - 1)):
        walls[number] = number + 1 if places[number + 1] in must else walls[number + 1]
    return tuple(walls)


def counts_of(cuts: Sequence[int], pieces: int) -> list[int]:
    """How many pieces each stage has: what `Pipeline(balance=[...])` takes."""
    return [end - first for first, end in pairwise([0, *cuts, pieces])]


def in_flight(schedule: Schedule) -> list[int]:
    """By stage: the microbatches that it holds when its rank holds the most."""
    found = [0] * schedule.stages
    for rank, row in enumerate(schedule.rows):
        held = {stage: 0 for stage in schedule.placement.stages_of(rank)}
        most = 0
        for action in row:
            for part in () if action is None else action.parts():
                if part.op is Op.F:
                    held[part.stage] += 1
                    if sum(held.values()) > most:
                        most = sum(held.values())
                        for stage, number in held.items():
                            found[stage] = number
                elif part.op is Op.B or part.op is Op.W or schedule.forward_only:
                    held[part.stage] -= 1
    return [1] * schedule.stages if schedule.forward_only else found


# -- from a run


@dataclass(frozen=True)
class Proposal:
    """A cut from measured times: what it is, and what it would gain."""

    before: tuple[int, ...]
    cuts: tuple[int, ...]  # those of before, where nothing better was found
    weights: tuple[float, ...]  # of the pieces, as measured
    loads_before: tuple[float, ...]  # of the ranks, a microbatch
    loads: tuple[float, ...]

    @property
    def gain(self) -> float:
        """How many times faster the most loaded rank gets; 1 where nothing was found."""
        return max(self.loads_before) / max(self.loads) if max(self.loads) else 1.0

    @property
    def changes(self) -> bool:
        """Is there anything to move?"""
        return self.cuts != self.before

    def __str__(self) -> str:
        pieces = len(self.weights)
        now = f"{counts_of(self.before, pieces)} pieces a stage, {max(self.loads_before):.4g} on the most loaded rank"
        if not self.changes:
            return f"nothing better than {now}"
        return (
            f"{counts_of(self.cuts, pieces)} instead of {now}: {max(self.loads):.4g}, {self.gain:.2f} times faster there"
        )


def stage_times(timeline: Timeline) -> list[float]:
    """By stage: what forward and backward of one microbatch take, from a run (medians over the microbatches)."""
    times = {key: statistics.median(values) for key, values in occupied(timeline).items()}
    found = []
    for stage in range(timeline.schedule.stages):
        if (Op.F, stage) not in times:
            raise UsageError(f"the timeline has no forward of stage {stage}; record a whole step, on every rank")
        found.append(sum(times.get((op, stage), 0.0) for op in (Op.F, Op.B, Op.I, Op.W)))
    return found


def measured_speeds(weights: Sequence[float], cuts: Sequence[int], timeline: Timeline) -> list[float]:
    """By rank, the fastest being 1: where it is the devices that differ and the weights are right."""
    times, bounds = stage_times(timeline), [0, *cuts, len(weights)]
    placement = timeline.schedule.placement
    rates = []
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        work = sum(sum(weights[bounds[stage] : bounds[stage + 1]]) for stage in stages)
        taken = sum(times[stage] for stage in stages)
        if not (work > 0 and taken > 0):
            raise UsageError(f"rank {rank} has pieces of weight {work:g} that took {taken:g}; nothing tells its speed")
        rates.append(work / taken)
    return [rate / max(rates) for rate in rates]


def propose(
    weights: Sequence[float],
    cuts: Sequence[int],
    timeline: Timeline,
    *,
    allowed: Sequence[int] | None = None,
    crossing: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
    fixed: Iterable[int] = (),
    slack: float = 0.0,
) -> Proposal:
    """A better cut after a run: the pieces' weights scaled so that each stage weighs what it took."""
    placement = timeline.schedule.placement
    bounds = [0, *cuts, len(weights)]
    if len(bounds) != placement.stages + 1 or any(first >= end for first, end in pairwise(bounds)):
        raise UsageError(
            f"cuts {list(cuts)} of {len(weights)} pieces make {len(bounds) - 1} stages; the timeline is of "
            f"{placement.stages}, each with at least 1 piece"
        )
    per_rank = _speeds(speeds, placement.ranks)
    times = stage_times(timeline)
    measured: list[float] = []
    before = [0.0] * placement.ranks
    for stage, (first, end) in enumerate(pairwise(bounds)):
        rank = placement.rank_of(stage)
        before[rank] += times[stage]
        pieces = weights[first:end] if sum(weights[first:end]) > 0 else [1.0] * (end - first)
        scale = times[stage] * per_rank[rank] / sum(pieces)
        measured += [weight * scale for weight in pieces]
    found = partition(
        measured,
        placement.stages,
        allowed=allowed,
        crossing=crossing,
        placement=placement,
        speeds=per_rank,
        fixed=fixed,
        slack=slack,
    )
    if found.largest >= max(before) * (1 - NO_GAIN):
        return Proposal(tuple(cuts), tuple(cuts), tuple(measured), tuple(before), tuple(before))
    return Proposal(tuple(cuts), found.cuts, tuple(measured), tuple(before), found.loads)
