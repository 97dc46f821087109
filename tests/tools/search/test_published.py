"""The published cases that schedules are judged by: idle share with profiled times, in given memory, at fixed effort.

The answers are the same on every machine. The bounds are a little above them: a change that moves an answer by a hair
is no failure, and one that loses what was reached is.
"""

from __future__ import annotations

import pytest
from tiers import mostly_exhaustive

from penstock.schedule import Costs, build, lower, search_curve, search_report, simulate, stage_costs, verify

SMALL = (8, 24, Costs(18.522, 18.086, 9.337, hop=0.601))  # ranks, microbatches, ms of a whole rank: a 1.5B model
MIDDLE = (8, 24, Costs(29.718, 29.444, 19.927, hop=0.527))  # 6.2B
LARGE = (16, 64, Costs(11.307, 11.254, 8.101, hop=0.379))  # 14.6B
Case = tuple[int, int, Costs]


IDLE = [
    (SMALL, 5, 400, 0.141),
    (SMALL, 5.34, 1200, 0.138),
    (SMALL, 8, 400, 0.064),
    (LARGE, 9, 60, 0.112),  # of two stages per rank, no V has less than .1297
]


@pytest.mark.parametrize(("case", "memory", "effort", "most"), mostly_exhaustive(IDLE, IDLE[0], IDLE[3]))
def test_idle_in_little_memory(case: Case, memory: float, effort: int, most: float) -> None:
    ranks, microbatches, costs = case
    found = search_report(ranks, microbatches, costs, memory, effort=effort)
    verify(lower(found.schedule))
    assert found.timeline.bubble <= most
    assert max(found.timeline.peak_memory) <= memory * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case", "stages_per_rank", "most"),
    [
        ("v-half", SMALL, 2, 0.170),
        ("zb-v", SMALL, 2, 0.0728),  # torch's order, at these costs
        ("interleaved-zb", MIDDLE, 4, 0.0482),  # torch's too
    ],
)
def test_families_built_for_costs(name: str, case: Case, stages_per_rank: int, most: float) -> None:
    ranks, microbatches, costs = case
    each = stage_costs(costs, stages_per_rank)
    schedule = build(name, ranks, microbatches, stages_per_rank, costs=each)
    verify(lower(schedule))
    assert simulate(schedule, each).bubble <= most


@pytest.mark.slow
def test_no_point_of_a_curve_is_worse_than_the_search_alone() -> None:
    """The curve was flat where `search` alone found better orders; where it is, each search has the cap before it."""
    ranks, microbatches, costs, caps = 4, 12, SMALL[2], (1.5, 2, 2.5, 3, 4)
    points = search_curve(ranks, microbatches, costs, caps, effort=60)
    for point in points:
        alone = search_report(ranks, microbatches, costs, point.memory, effort=60)
        assert point.found.value <= alone.value * (1 + 1e-9)
    idles = [point.idle for point in points]
    assert idles == sorted(idles, reverse=True)
    assert len({round(idle, 4) for idle in idles}) == len(caps)  # it falls at every step
