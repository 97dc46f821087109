"""Bounds by refutation: raised where it can be shown that no schedule is that short, and left alone where not."""

from __future__ import annotations

import math

import pytest
from tools.search.bounds.small_pipelines import instance

from penstock.schedule import Costs, Placement, build, lower_bound, simulate
from penstock.tools.search.bounds.refutation import MOST_JOBS, refuted_bound

UNLIMITED = (math.inf, math.inf)


def test_a_pipeline_that_reaches_its_bound_is_left_at_it() -> None:
    """One rank has no idle time, so its work is the optimum; the last grain of the bound is not looked for."""
    best = simulate(build("1f1b", 1, 4)).makespan
    found = refuted_bound(Placement.loop(1), 4, Costs(), (math.inf,), best)
    assert found == pytest.approx(best)
    assert refuted_bound(Placement.loop(1), 4, Costs(), (math.inf,), 0.5 * best) >= 0.98 * best


def test_what_the_other_bounds_miss_is_found() -> None:
    """Two loops over two ranks, memory for four of six: 57 by the other bounds, where the exact solver proves 63."""
    costs = Costs(forward=2, input=[1, 4, 4, 5], weight=2, hop=2)
    case = (Placement.loop(2, 2), 3, costs, 4)
    assert lower_bound(*case, quick=True) == 57
    assert 0.97 * 63 <= lower_bound(*case) <= 63


def test_the_answer_is_the_same_every_time() -> None:
    case = instance(50)
    assert lower_bound(*case) == lower_bound(*case)


def test_a_pipeline_that_is_too_large_is_left_at_the_bound_that_it_has() -> None:
    stages = MOST_JOBS // 3 // 4 + 1
    assert refuted_bound(Placement.loop(stages), 4, Costs(), (math.inf,) * stages, 1.0) == 1.0


def test_messages_of_both_directions_and_sizes_count() -> None:
    """Microbatches of 1 and 3 whose messages occupy the link 4 times as long as they compute."""
    costs = Costs(links=[[0, 4], [4, 0]], sizes=[1, 3])
    bound = lower_bound(Placement.loop(2), 2, costs)
    assert bound > lower_bound(Placement.loop(2), 2, costs, quick=True)
    assert bound <= simulate(build("1f1b", 2, 2), costs).makespan


def test_a_full_backward_never_holds_what_a_split_one_keeps_for_its_weights() -> None:
    """Where I leaves more than F took, a rank with room for the activation alone still runs full backwards."""
    schedule, costs = build("1f1b", 2, 2), Costs(forward=0.0, input=0.0, weight=0.0, held=2.0, latency=1.0)
    timeline = simulate(schedule, costs)
    assert lower_bound(schedule.placement, 2, costs, list(timeline.peak_memory)) <= timeline.makespan
