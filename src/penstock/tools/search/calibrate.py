"""Costs from a run: what each stage's computes took, and how long a message was on its way.

What a compute took is how long it kept its rank (`timing/occupied.py`). Medians are taken, because
a step that was disturbed once is not a slower step.

A message tells its time only where somebody stood waiting for it: then the wait ended with its
arrival. Where nobody ever waited, the shortest time from making to using is all that is known,
and it is an upper bound.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from penstock.errors import UsageError
from penstock.schedule.action import Op
from penstock.schedule.schedule import Schedule
from penstock.schedule.timing.costs import Costs
from penstock.schedule.timing.occupied import kept_times, occupied
from penstock.schedule.timing.timeline import Timeline

Edge = tuple[int, int]  # two stages


def _overlap(timeline: Timeline, costs: Costs) -> dict[Edge, float] | None:
    """Return, by (stage of F, of the backward), what pairs that were run as one took of the sum of their parts.

    Only where both parts also ran by themselves, as they do while a pipeline fills and drains.
    """
    schedule = timeline.schedule
    times = costs.recomputed(schedule.stages, schedule.recompute).by_op(schedule.stages)
    alone = {(span.action.op, span.action.stage) for span in timeline.spans if span.action.pair is None}
    alone |= {(Op.B, stage) for op, stage in alone if op is Op.I and (Op.W, stage) in alone}
    found: dict[Edge, list[float]] = defaultdict(list)
    for span, time in kept_times(timeline):
        if span.action.pair is not None:
            forward, backward = sorted(span.action.pair, key=lambda part: part.op is not Op.F)
            whole = sum(times[part.op][part.stage] for part in (forward, backward))
            if whole > 0 and alone.issuperset((part.op, part.stage) for part in (forward, backward)):
                found[forward.stage, backward.stage].append(time / whole)
    return {stages: statistics.median(shares) for stages, shares in found.items()} or None


def hops(timeline: Timeline) -> dict[Edge, list[float]]:
    """Return, by (stage that made it, stage that used it), the times of messages that somebody waited for."""
    found: dict[Edge, list[float]] = defaultdict(list)
    for span in timeline.spans:
        maker = timeline.waited_for(span) if span.wait else None
        if maker is not None and maker.end <= span.start:
            there_first = span.start - span.wait <= maker.end  # waiting before it was even made
            if there_first or timeline.has_waited(span):
                found[maker.action.stage, span.action.stage].append(span.start - maker.end)
    return found


def _hop(timeline: Timeline) -> float:
    waited = [time for times in hops(timeline).values() for time in times]
    if waited:
        return statistics.median(waited)
    gaps = [
        span.start - maker.end
        for span in timeline.spans
        for _, maker in timeline.needed_by(span)
        if maker.rank != span.rank
    ]
    return max(0.0, min(gaps, default=0.0))


def _full(timeline: Timeline, times: Mapping[tuple[Op, int], float], stage: int) -> float:
    """Return a stage's full backward, without the forward that it runs again."""
    again = times[Op.F, stage] if stage in timeline.schedule.recompute else 0.0
    return max(0.0, times.get((Op.B, stage), 0.0) - again)


def costs_of(timeline: Timeline) -> Costs:
    """Return the costs under which the simulator repeats the run; see `Costs.from_timeline`."""
    times = {key: statistics.median(values) for key, values in occupied(timeline).items()}
    stages = range(timeline.schedule.stages)
    missing = [stage for stage in stages if (Op.F, stage) not in times]
    if missing:
        raise UsageError(f"the timeline has no forward of stage {missing[0]}; record a whole step, on every rank")
    halves = {}
    for op in (Op.I, Op.W):  # a stage that only ran full backwards tells their sum alone
        halves[op] = [times.get((op, stage), _full(timeline, times, stage) / 2) for stage in stages]
    for stage in timeline.schedule.recompute:
        if (Op.I, stage) in times:
            halves[Op.I][stage] = max(0.0, times[Op.I, stage] - times[Op.F, stage])
    costs = Costs(
        forward=[times[Op.F, stage] for stage in stages], input=halves[Op.I], weight=halves[Op.W], hop=_hop(timeline)
    )
    return replace(costs, overlap=_overlap(timeline, costs))


def outside(timeline: Timeline) -> float:
    """Return what a step took beside its makespan: the batch and the optimizer before it, the reports after it.

    Not what a rank waited in its first action: where the ranks did not come to the step together, that is no work.
    """
    if not timeline.walls or not timeline.spans:
        return 0.0
    firsts = [
        row[0].start - row[0].wait - wall.start for row, wall in zip(timeline.by_rank, timeline.walls, strict=True)
    ]
    end = timeline.start + timeline.makespan
    after = [wall.done - end for wall in timeline.walls]
    return max(0.0, max(firsts)) + max(0.0, statistics.median(after))


def fitted(costs: Costs, schedule: Schedule, stages: int) -> Costs:
    """Return costs measured on `stages` stages for a schedule that may cut the same model into another number.

    Another cut is taken to be even: each of its stages gets an equal part of the whole model's time.
    """
    if schedule.stages == stages:
        return costs
    forward, backward, weight = (
        sum(costs.per_stage(name, stages)) / schedule.stages for name in ("forward", "input", "weight")
    )
    overlap = statistics.fmean(costs.overlap.values()) if isinstance(costs.overlap, Mapping) else costs.overlap
    return Costs(forward=forward, input=backward, weight=weight, hop=costs.hop, overlap=overlap)
