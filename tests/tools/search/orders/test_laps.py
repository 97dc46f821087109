"""Laps of a loop: changes that all ranks make alike, and what only they can gain."""

from __future__ import annotations

import random

import pytest

from penstock.schedule import Costs, Placement, lower, search_report, simulate, stage_costs, verify
from penstock.schedule.builders.problem import Problem
from penstock.tools.search.budget import Budget
from penstock.tools.search.orders.evaluate import complete
from penstock.tools.search.orders.grouped import Grouping, grouped, laps_of, take_laps
from penstock.tools.search.orders.laps import change_laps

PROFILED = Costs(18.522, 18.086, 9.337, hop=0.601)  # ms of a whole rank, as published for a 1.5B model


def loop(ranks: int, per_rank: int, microbatches: int, memory: float) -> Problem:
    costs = stage_costs(PROFILED, per_rank)
    return Problem(Placement.loop(ranks, per_rank), microbatches, costs, (memory,) * ranks)


def test_the_laps_of_a_grouping_go_group_by_group() -> None:
    problem = loop(2, 2, 3, 9.0)
    laps = laps_of(problem, Grouping(2, even=True))
    assert laps.forwards == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
    assert laps.inputs == [(1, 0), (1, 1), (0, 0), (0, 1), (1, 2), (0, 2)]
    assert take_laps(problem, laps) == grouped(problem, Grouping(2, even=True))


@pytest.mark.parametrize("seed", range(4))
def test_changed_laps_make_a_schedule_within_memory_that_is_no_longer(seed: int) -> None:
    generator = random.Random(seed)
    problem = loop(generator.randint(2, 4), generator.randint(2, 3), generator.randint(4, 9), 4.0)
    laps = laps_of(problem, Grouping(2, patience=0.3))
    _, first = change_laps(problem, laps, 0, Budget(0.0, 1), generator)
    changed, found = change_laps(problem, laps, 60, Budget(0.0, 1000), generator)
    assert found.score <= first.score
    assert sorted(changed.forwards) == sorted(laps.forwards)
    schedule = problem.schedule(complete(problem, found), "auto")
    verify(lower(schedule))
    timeline = simulate(schedule, problem.costs)
    assert timeline.makespan == pytest.approx(found.score[0])
    assert max(timeline.peak_memory) <= 4.0 * (1 + 1e-9)


def test_no_change_is_tried_beyond_the_budget() -> None:
    problem, budget = loop(3, 2, 6, 3.0), Budget(0.0, 5)
    change_laps(problem, laps_of(problem, Grouping(2)), 100, budget, random.Random(0))
    assert budget.orders == 5


@pytest.mark.slow
def test_memory_for_one_stage_more_than_the_groups_need_is_put_to_use() -> None:
    """Group-interleaved needs 5 of 8 microbatches; changes on single ranks made nothing of a third of one more."""
    problem = loop(8, 4, 24, 16 / 3)
    laps = laps_of(problem, Grouping(4, patience=0.3))
    runs = [change_laps(problem, laps, 250, Budget(0.0, 1000), random.Random(seed))[1] for seed in range(3)]
    best = min(runs, key=lambda candidate: candidate.score)
    timeline = simulate(problem.schedule(complete(problem, best), "auto"), problem.costs)
    assert timeline.bubble <= 0.135
    assert max(timeline.peak_memory) <= 16 / 3 * (1 + 1e-9)


@pytest.mark.slow
def test_a_search_changes_laps_too() -> None:
    found = search_report(8, 24, PROFILED, 16 / 3, stages_per_rank=4, placements="loop", effort=700)
    assert found.timeline.bubble <= 0.137  # .1375 is what groups alone reach
