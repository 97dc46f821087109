"""`search(objective="steady")`: the time per step where steps overlap, and not the makespan of one step."""

from __future__ import annotations

import random

import pytest
from tiers import mostly_slow

from penstock.errors import UsageError
from penstock.schedule import (
    FAMILIES,
    Costs,
    Placement,
    build,
    lower,
    search_report,
    simulate,
    stage_costs,
    steady_state,
    verify,
)
from penstock.schedule.builders import TRAINING
from penstock.schedule.builders.problem import Problem
from penstock.tools.search.bounds.steady_bound import steady_bound

SMALL = 8, 24, Costs(forward=18.522, input=18.086, weight=9.337, hop=0.601)  # published times, in ms
MIDDLE = 16, 64, Costs(forward=11.307, input=11.254, weight=8.101, hop=0.379)
ROUNDING = 1 + 1e-9


def problem(ranks: int, microbatches: int, costs: Costs, legs: int, memory: float) -> Problem:
    each = stage_costs(costs, legs)
    return Problem(Placement.v(ranks, legs), microbatches, each, (memory,) * ranks, objective="steady")


def test_the_value_is_the_period_and_no_family_that_fits_has_a_shorter_one() -> None:
    costs = Costs(forward=1.0, input=1.0, weight=0.4, hop=0.2)
    found = search_report(4, 10, costs, memory=4, objective="steady", effort=300)
    verify(lower(found.schedule), steps=2)
    assert found.value == found.steady.period == steady_state(found.schedule, found.costs).period
    assert found.lower_bound <= found.value * ROUNDING
    assert max(found.timeline.peak_memory) <= 4 * ROUNDING
    for name in TRAINING:
        schedule = build(name, 4, 10)
        each = stage_costs(costs, schedule.placement.stages_per_rank)
        if max(simulate(schedule, each).peak_memory) <= 4 * ROUNDING:
            assert found.value <= steady_state(schedule, each).period * ROUNDING


def test_with_equal_costs_and_free_hops_no_rank_ever_idles() -> None:
    found = search_report(4, 12, memory=4, objective="steady", effort=50)
    assert found.proved
    assert found.steady.idle == pytest.approx(0.0)
    assert found.timeline.bubble > 0.01


def test_more_is_gained_than_by_a_search_for_the_makespan() -> None:
    ranks, microbatches, costs = SMALL
    single = search_report(ranks, microbatches, costs, ranks, 4, "v", effort=20)
    found = search_report(ranks, microbatches, costs, ranks, 4, "v", objective="steady", effort=20)
    assert single.timeline.bubble < found.timeline.bubble  # alone, the other one is better
    assert found.steady.idle < 0.9 * single.steady.idle


def test_waves_reach_the_bound_of_a_single_step_too() -> None:
    """At 1F1B's memory, where .062 was the least that was found, and on a loop."""
    ranks, microbatches, costs = SMALL
    found = search_report(ranks, microbatches, costs, ranks, effort=200)
    assert found.proved
    assert found.timeline.bubble == pytest.approx(0.0456, abs=1e-4)


@pytest.mark.parametrize(
    ("case", "effort", "most"), [(SMALL, 20, 0.0375), pytest.param(MIDDLE, 8, 0.0235, marks=pytest.mark.slow)]
)
def test_published_times_in_the_memory_of_1f1b(case: tuple[int, int, Costs], effort: int, most: float) -> None:
    """Before there were waves, searches gave .0668 and .0400."""
    ranks, microbatches, costs = case
    found = search_report(ranks, microbatches, costs, ranks, 4, "v", objective="steady", effort=effort)
    verify(lower(found.schedule), steps=2)
    assert found.steady.idle <= most
    assert max(found.timeline.peak_memory) <= ranks * ROUNDING


def test_stages_that_differ_a_little_keep_the_order_of_equal_ones() -> None:
    """Waves made with the true times of such stages gave .079, of which the busiest rank alone explains .054."""
    ranks, microbatches, costs = SMALL
    draw = random.Random(2)
    shares = [draw.uniform(0.9, 1.1) / 4 for _ in range(4 * ranks)]
    forward, backward, weight = ([time * share for share in shares] for time in (18.522, 18.086, 9.337))
    uneven = Costs(forward, backward, weight, hop=costs.hop, activation=[0.25] * 4 * ranks)
    found = search_report(ranks, microbatches, uneven, ranks, 4, "v", objective="steady", effort=40)
    assert found.steady.idle < 0.069
    assert max(found.timeline.peak_memory) <= ranks * ROUNDING


def test_the_same_effort_gives_the_same_schedule() -> None:
    asked = {"memory": 3.0, "stages_per_rank": 4, "placements": "v", "objective": "steady", "effort": 60}
    costs = Costs(forward=1.0, input=1.1, weight=0.6, hop=0.1)
    first, again = (search_report(3, 7, costs, seed=5, **asked) for _ in range(2))
    assert first.schedule == again.schedule


@pytest.mark.parametrize("legs", [2, 4, 6, 8, 10])
def test_at_the_published_times_memory_and_hops_keep_equal_stages_on_a_v_above_two_hundredths(legs: int) -> None:
    """With few legs the last rank runs out of W between two steps; with many, the hops of the fill take longer."""
    ranks, microbatches, costs = SMALL
    period = steady_bound(problem(ranks, microbatches, costs, legs, ranks))
    work = microbatches * (18.522 + 18.086 + 9.337)
    assert 1 - work / period > 0.025
    assert steady_bound(problem(ranks, microbatches, costs, legs, 2 * ranks)) == pytest.approx(work)  # twice the memory


def test_the_bound_of_a_v_is_what_its_formula_says() -> None:
    ranks, microbatches, costs = SMALL
    idle = 7 * (18.522 + 18.086) / 4 + 9.337 / 4 + 2 * 5 * 7 * 0.601 - 8 * 9.337
    expected = microbatches * (18.522 + 18.086 + 9.337) + idle
    assert steady_bound(problem(ranks, microbatches, costs, 4, ranks)) == pytest.approx(expected)


@pytest.mark.parametrize("hop", [0.0, 0.3])
@pytest.mark.parametrize("family", TRAINING)
def test_no_family_beats_the_bound(family: str, hop: float) -> None:
    schedule = build(family, 3, 7)
    each = stage_costs(Costs(forward=1.2, input=1.0, weight=0.5, hop=hop), schedule.placement.stages_per_rank)
    caps = simulate(schedule, each).peak_memory
    priced = Problem(schedule.placement, 7, each, caps, objective="steady")
    assert steady_bound(priced) <= steady_state(schedule, each).period * ROUNDING


def drawn_costs(draw: random.Random) -> Costs:
    """Also such that a backward takes next to nothing, hops take longer than computes, or little stays until W."""
    forward, backward, weight = (draw.choice((0.01, 0.5, 1.0, draw.uniform(0.1, 3.0))) for _ in range(3))
    hop, held = draw.choice((0.0, 0.3, draw.uniform(0.5, 3.0))), draw.choice((None, 1.0, 0.4, 1.5))
    return Costs(forward, backward, weight, hop=hop, held=held)


@pytest.mark.parametrize("seed", mostly_slow(range(40), *range(10)))
def test_the_bound_is_below_every_family_whatever_the_costs_and_sizes(seed: int) -> None:
    draw = random.Random(seed)
    for family in TRAINING:
        ranks, microbatches, costs = draw.randint(1, 5), draw.randint(1, 10), drawn_costs(draw)
        schedule = build(family, ranks, microbatches, 2 if FAMILIES[family].layout == "v" else draw.randint(1, 3))
        each = stage_costs(costs, schedule.placement.stages_per_rank)
        peaks = simulate(schedule, each).peak_memory
        period = steady_state(schedule, each).period
        for caps in (peaks, (max(peaks),) * ranks, (float("inf"),) * ranks):
            priced = Problem(schedule.placement, microbatches, each, caps, objective="steady")
            assert steady_bound(priced) <= period * ROUNDING, (family, ranks, microbatches, costs, caps)


@pytest.mark.parametrize("seed", mostly_slow(range(20), *range(6)))
def test_the_bound_of_a_search_is_below_what_it_finds(seed: int) -> None:
    draw = random.Random(seed)
    ranks, microbatches, costs = draw.randint(2, 4), draw.randint(1, 8), drawn_costs(draw)
    memory, kinds = draw.choice((None, 2.0 * ranks, ranks, 2.0)), draw.choice(("loop", "v"))
    per_rank, again = draw.randint(1, 3), draw.random() < 0.5
    asked = {"memory": memory, "stages_per_rank": per_rank, "placements": kinds, "recompute": again}
    found = search_report(ranks, microbatches, costs, objective="steady", effort=15, **asked)  # type: ignore[arg-type]
    assert found.lower_bound <= found.value * ROUNDING


@pytest.mark.parametrize("seed", mostly_slow(range(20), *range(6)))
def test_the_bound_is_below_what_is_found_for_stages_that_all_differ(seed: int) -> None:
    """In memory for as many microbatches as there are ranks, with legs of different sizes or stages at random."""
    draw = random.Random(seed)
    ranks, microbatches, legs, kind = (
        draw.randint(2, 4),
        draw.randint(2, 9),
        draw.randint(1, 4),
        draw.choice(("v", "loop")),
    )
    by_leg = [draw.choice((0.1, 0.3, 1.0)) for _ in range(legs)]
    shares = [draw.uniform(0.5, 1.5) * by_leg[stage // ranks] for stage in range(legs * ranks)]
    shares = [share * ranks / sum(shares) for share in shares]
    forward, backward, weight = ([draw.uniform(0.2, 2.0) * share for share in shares] for _ in range(3))
    costs = Costs(forward, backward, weight, hop=draw.choice((0.0, 0.2)), activation=shares)
    memory = 1.5 * ranks
    found = search_report(ranks, microbatches, costs, memory, legs, kind, objective="steady", effort=40)
    assert found.lower_bound <= found.value * ROUNDING
    assert found.value == pytest.approx(steady_state(found.schedule, found.costs).period)
    assert max(found.timeline.peak_memory) <= memory * ROUNDING


def test_where_all_forwards_may_come_first_the_idle_time_of_both_ends_counts_once() -> None:
    """Added up, the two times of rank 0 were 7; and the best placement was given up for a bound above its orders."""
    alone = search_report(2, 1, objective="steady", stages_per_rank=1, effort=5)
    assert alone.value == alone.lower_bound == 5
    costs = Costs(forward=2.0, input=0.01, weight=2.614, hop=0.809)
    found = search_report(3, 3, costs, objective="steady", effort=50)
    assert found.lower_bound <= found.value <= steady_state(build("zb-h1", 3, 3), costs).period


def test_where_halves_do_not_fit_a_family_with_full_backwards_is_priced_by_its_period() -> None:
    costs = Costs(activation=1.0, held=3.0)
    found = search_report(2, 4, costs, memory=2.0, stages_per_rank=1, objective="steady", effort=20)
    assert found.value == pytest.approx(steady_state(found.schedule, found.costs).period)


def test_layers_are_cut_for_the_makespan_only() -> None:
    with pytest.raises(UsageError, match="objective='steady' is for costs by rank or stage"):
        search_report(2, 4, layers=[1.0, 1.0, 1.0, 1.0], objective="steady")
