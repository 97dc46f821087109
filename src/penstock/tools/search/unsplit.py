"""Families with full backwards, for the two cases in which their orders may be better than split ones.

The search splits every backward into I and W, which is never slower and, as a rule, holds no more.
Where a stage holds more between I and W than before them (`held` above `activation`: the gradients
of its outputs stay too), a full backward fits into memory that its two halves do not; and where
`overlap` says what a pair of a forward and a full backward takes, pairs save time. There, and
only there, the families with full backwards are priced as they are, those that can have pairs with them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.schedule.builders import FAMILIES, build
from penstock.schedule.builders.problem import ROUNDING, stage_costs
from penstock.schedule.lowering.align import align
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.timing.costs import Costs
from penstock.schedule.timing.simulate import simulate
from penstock.schedule.timing.steady import steady_state
from penstock.schedule.timing.timeline import Timeline
from penstock.tools.search.bounds.lower_bound import lower_bound
from penstock.tools.search.request import Request
from penstock.tools.search.space import placements_for, recompute_choices

__all__ = ["Unsplit", "best_unsplit"]


class Unsplit(NamedTuple):
    """The best of them."""

    schedule: Schedule
    costs: Costs  # of one stage
    kind: str  # of the placement
    value: float
    bound: float


def built_for(placement: Placement, microbatches: int, names: Iterable[str], *, pairs: bool) -> Iterator[Schedule]:
    """The named families' schedules for a placement; of interleaved-1f1b also the one with pairs, where asked for."""
    ranks, per_rank = placement.ranks, placement.stages_per_rank
    for name in names:
        if FAMILIES[name].placed(ranks, per_rank) == placement and (FAMILIES[name].layout != "v" or per_rank == 2):
            yield build(name, ranks, microbatches, per_rank)
            if pairs and name == "interleaved-1f1b":
                yield build(name, ranks, microbatches, per_rank, overlap_b_f=True)


def best_unsplit(request: Request) -> Unsplit | None:
    """The best family with full backwards that fits; None where none does.

    Also None where splitting costs no memory and overlapped pairs gain no time: then other orders are never worse.
    """
    full = [name for name, family in FAMILIES.items() if family.has_full_backwards]
    best: Unsplit | None = None
    for kind, placement in placements_for(request):
        each = stage_costs(request.priced, placement.stages_per_rank)
        pairs = zip(
            each.per_stage("held", placement.stages), each.per_stage("activation", placement.stages), strict=True
        )
        if each.overlap is None and all(held <= activation for held, activation in pairs):
            continue
        for built in built_for(placement, request.microbatches, full, pairs=each.overlap is not None):
            for again in recompute_choices(request, placement):
                schedule = align(built.replace(recompute=again, name="auto"))
                timeline = simulate(schedule, each)
                fits = all(
                    peak <= cap * (1 + ROUNDING) for peak, cap in zip(timeline.peak_memory, request.caps, strict=True)
                )
                value = _value(schedule, each, timeline, request.objective)
                if fits and (best is None or value < best.value):
                    bound = lower_bound(
                        placement,
                        request.microbatches,
                        each,
                        request.caps,
                        span=request.objective != "makespan",
                        recompute=again,
                        quick=True,
                    )
                    best = Unsplit(schedule, each, kind, value, bound)
    return best


def _value(schedule: Schedule, costs: Costs, timeline: Timeline, objective: str) -> float:
    if objective == "steady":
        return steady_state(schedule, costs).period
    return max(row[-1].end - row[0].start for row in timeline.by_rank) if objective == "span" else timeline.makespan
