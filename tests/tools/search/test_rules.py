"""Orders on a V for steps that overlap: complete, within memory, and full of forwards when the first gradient comes."""

from __future__ import annotations

import pytest

from penstock.schedule import Costs, Placement, lower, stage_costs, steady_state, verify
from penstock.schedule.builders.filling import fill
from penstock.schedule.builders.problem import Problem
from penstock.tools.search.placement_search import made
from penstock.tools.search.rules import Wave

COSTS = Costs(forward=1.0, input=1.0, weight=0.5, hop=0.03)


def problem(ranks: int, microbatches: int, legs: int, memory: float) -> Problem:
    each = stage_costs(COSTS, legs)
    return Problem(Placement.v(ranks, legs), microbatches, each, (memory,) * ranks, objective="steady")


@pytest.mark.parametrize("legs", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 1), (3, 5), (4, 9)])
def test_every_size_gives_a_schedule_that_is_proved_over_two_steps(ranks: int, microbatches: int, legs: int) -> None:
    asked = problem(ranks, microbatches, legs, ranks)
    orders = made(asked, Wave())
    assert orders is not None
    found = fill(asked, orders, (0.8, 0.8))
    schedule = asked.schedule(found.orders, "wave")
    verify(lower(schedule), steps=2)
    assert steady_state(schedule, asked.costs).period <= found.score[0] * (1 + 1e-9)


def test_memory_is_full_of_forwards_when_the_first_gradient_is_there() -> None:
    ranks, legs = 4, 4
    asked = problem(ranks, 12, legs, ranks)
    orders = made(asked, Wave())
    assert orders is not None
    for order in orders:
        first = next(place for place, x in enumerate(order) if x >= asked.size)
        assert first == ranks * legs


def test_ranks_far_from_the_first_keep_more_w_for_the_time_between_two_steps() -> None:
    asked = problem(4, 12, 4, 4)
    assert asked.between[0] == 0
    assert asked.between == sorted(set(asked.between))
    orders = made(asked, Wave())
    assert orders is not None
    filled = fill(asked, orders, (0.8, 0.8)).orders
    after = [len(row) - 1 - max(place for place, x in enumerate(row) if x < 2 * asked.size) for row in filled]
    assert after == sorted(after)
    assert after[-1] > after[0] + 4
