"""Orders for memory below 1F1B's: groups on a loop, a rhythm on a V, and the builders and the curve that use them."""

from __future__ import annotations

import random

import pytest

from penstock.errors import UsageError
from penstock.schedule import (
    FAMILIES,
    Costs,
    Placement,
    Schedule,
    build,
    lower,
    search_curve,
    search_report,
    simulate,
    stage_costs,
    verify,
)
from penstock.schedule.builders.dispatch import Rule
from penstock.schedule.builders.filling import Candidate, complete, price
from penstock.schedule.builders.problem import Problem
from penstock.schedule.builders.rhythm import Rhythm
from penstock.tools.search.placement_search import made
from penstock.tools.search.portfolio import drawn, first_rules
from penstock.tools.search.rules import ByStage, Groups, Wave, group_sizes

PROFILED = Costs(18.522, 18.086, 9.337, hop=0.601)  # ms of a whole rank, as published for a 1.5B model
TUNED = [name for name, family in FAMILIES.items() if family.cap is not None]


def problem(placement: Placement, microbatches: int, memory: float, costs: Costs = PROFILED) -> Problem:
    each = stage_costs(costs, placement.stages_per_rank)
    return Problem(placement, microbatches, each, (memory,) * placement.ranks)


def idle(schedule: Schedule, costs: Costs) -> float:
    return simulate(schedule, stage_costs(costs, schedule.placement.stages_per_rank)).bubble


def idle_of(given: Problem, rule: Rule, overrun: tuple[float, float]) -> float:
    orders = made(given, rule)
    assert orders is not None
    score = price(given, orders, overrun)
    assert score is not None
    return 1 - given.microbatches * given.busiest / score[0]


def test_groups_of_half_the_ranks_idle_little_in_five_eighths_of_the_memory() -> None:
    assert idle_of(problem(Placement.loop(8, 4), 24, 5.0), Groups(size=4), (0.0, 0.0)) <= 0.140


def test_the_rhythm_of_a_v_idles_little_in_half_of_the_memory() -> None:
    assert idle_of(problem(Placement.v(8, 2), 24, 5.0), Rhythm(), (0.9, 0.0)) <= 0.170


def test_in_a_quarter_of_the_memory_microbatches_that_never_rest_idle_least() -> None:
    """What is on its way goes on at once, and the next one starts when memory can bear it."""
    given = problem(Placement.v(8, 2), 24, 2.0)
    paced = idle_of(given, Rhythm(patience=0.0, weight_time=1.0, hop_time=1.0, pace=1.12), (0.9, 0.0))
    assert paced <= 0.565
    assert paced < idle_of(given, Rhythm(slack=None), (0.9, 0.0)) - 0.03


def test_where_memory_is_tight_groups_as_large_as_it_holds_come_first() -> None:
    """Groups that never make a rank wait do not fit; of the others, larger ones idle less."""
    first = first_rules(problem(Placement.loop(8, 4), 24, 4.0))[0]
    assert first == Groups(size=4, patience=0.0)
    assert first_rules(problem(Placement.loop(8, 4), 24, 8.0))[0] != Groups(size=8, patience=0.0)


def test_a_group_that_memory_does_not_hold_has_no_order() -> None:
    given = problem(Placement.loop(4, 2), 8, 1.0)
    assert made(given, Groups(size=4)) is None
    assert made(problem(Placement.v(4, 2), 8, 1.0), Rhythm(slack=4.0)) is None


@pytest.mark.parametrize(
    ("microbatches", "size", "even", "sizes"),
    [
        (24, 4, False, [4] * 6),
        (9, 4, False, [4, 5]),
        (11, 4, False, [4, 4, 3]),
        (11, 4, True, [4, 4, 3]),
        (9, 4, True, [3] * 3),
        (3, 4, False, [3]),
    ],
)
def test_groups_share_a_batch(microbatches: int, size: int, even: bool, sizes: list[int]) -> None:
    assert group_sizes(microbatches, size, even) == sizes


def test_what_rules_make_is_a_schedule_within_memory() -> None:
    generator = random.Random(0)
    seen = set()
    for _ in range(60):
        ranks, per_rank = generator.randint(1, 6), generator.randint(1, 4)
        placement = generator.choice((Placement.loop, Placement.v))(ranks, per_rank)
        costs = Costs(*(generator.uniform(0.5, 2) for _ in range(3)), hop=generator.uniform(0, 0.2))
        given = problem(placement, generator.randint(1, 12), generator.uniform(1, 2 * ranks), costs)
        rule = drawn(given, None, generator)
        orders = made(given, rule)
        if orders is None or price(given, orders, (0.3, 0.0)) is None:
            continue
        seen.add(type(rule))
        schedule = given.schedule(complete(given, Candidate((0.0, 0.0), orders, (0.3, 0.0))), "auto")
        verify(lower(schedule))
        timeline = simulate(schedule, given.costs)
        assert max(timeline.peak_memory) <= given.memory[0] * (1 + 1e-9)
        assert timeline.makespan == pytest.approx(price(given, orders, (0.3, 0.0))[0])
    assert seen == {ByStage, Groups, Rhythm, Wave}


def test_search_within_five_eighths_of_the_memory() -> None:
    found = search_report(8, 24, PROFILED, 5, stages_per_rank=4, placements="loop", seconds=0)
    verify(lower(found.schedule))
    assert found.timeline.bubble <= 0.140
    assert max(found.timeline.peak_memory) <= 5 * (1 + 1e-9)


@pytest.mark.parametrize("name", TUNED)
def test_costs_make_a_family_shorter_in_the_same_memory(name: str) -> None:
    costs = Costs(1.0, 0.9, 0.4, hop=0.05)
    plain, tuned = build(name, 3, 6), build(name, 3, 6, costs=costs)
    verify(lower(tuned))
    assert tuned.placement == plain.placement
    assert tuned.name == name
    assert simulate(tuned, costs).makespan <= simulate(plain, costs).makespan
    assert max(simulate(tuned).peak_activations) <= max(simulate(plain).peak_activations)
    assert tuned == build(name, 3, 6, costs=costs)


def test_costs_of_a_block_are_those_of_its_stages() -> None:
    costs = Costs(forward=[1, 3] * 3, input=1.0, weight=0.5, bandwidth=10.0, bytes=[1.0] * 6)
    schedule = build("zb-h1", 3, 6, 2, costs=costs)
    verify(lower(schedule))
    assert simulate(schedule, costs).makespan <= simulate(build("zb-h1", 3, 6, 2), costs).makespan


def test_families_without_choices_ignore_costs_and_auto_takes_them() -> None:
    costs = Costs(1.0, 0.9, 0.4, hop=0.05)
    assert build("1f1b", 3, 5, costs=costs) == build("1f1b", 3, 5)
    assert idle(build("auto", 3, 6, costs=costs), costs) <= idle(build("auto", 3, 6), costs) + 1e-9


@pytest.mark.parametrize(
    ("costs", "message"), [(3.0, "costs must be a Costs"), (Costs(sizes=[1.0] * 5), "order_microbatches")]
)
def test_costs_that_a_builder_cannot_use_are_refused(costs: Costs, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build("zb-v", 3, 5, costs=costs)


@pytest.mark.slow
def test_v_half_for_the_costs_of_a_larger_model_idles_no_more_than_published() -> None:
    each = stage_costs(Costs(11.307, 11.254, 8.101, hop=0.379), 2)  # ms, as published for a 14.6B model
    schedule = build("v-half", 16, 64, costs=each)
    assert simulate(schedule, each).bubble <= 0.132
    assert max(simulate(schedule).peak_activations) <= 18


@pytest.mark.parametrize(("name", "most"), [("v-half", 0.1057), ("zb-v", 0.0465)])
def test_equal_costs_need_not_be_given(name: str, most: float) -> None:
    assert idle(build(name, 8, 24), Costs()) <= most


def test_group_interleaved_holds_what_it_says() -> None:
    for ranks, microbatches, per_rank in ((8, 24, 2), (8, 24, 4), (6, 12, 3), (1, 3, 2), (5, 9, 1)):
        schedule = build("group-interleaved", ranks, microbatches, per_rank)
        verify(lower(schedule))
        if microbatches % max(1, ranks // 2) == 0:
            half = (ranks + 1) // 2
            assert max(simulate(schedule).peak_activations) <= (per_rank - 1) * half + ranks


@pytest.mark.slow
def test_the_curve_never_rises_and_every_point_fits() -> None:
    points = search_curve(4, 8, PROFILED, [0.5, 1, 2, 3, 4, 8], effort=150)
    assert [point.memory for point in points] == [1, 2, 3, 4, 8]
    for point in points:
        verify(lower(point.found.schedule))
        assert max(point.found.timeline.peak_memory) <= point.memory * (1 + 1e-9)
    idles = [point.idle for point in points]
    assert idles == sorted(idles, reverse=True)
    assert idles[0] > 2 * idles[-1]
    again = search_curve(4, 8, PROFILED, [0.5, 1, 2, 3, 4, 8], effort=150)
    assert [point.found.schedule for point in again] == [point.found.schedule for point in points]


def test_with_pairs_the_makespan_never_rises_though_the_idle_share_may() -> None:
    points = search_curve(2, 4, Costs(2, 1, 1, held=0, overlap=0.6), [1.5, 2, 5, 8], effort=20)
    makespans = [point.found.makespan for point in points]
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[-1] < makespans[1]
    assert points[-1].idle > points[1].idle  # a shorter step, in which pairs compute for less time
    for point in points:
        assert max(point.found.timeline.peak_memory) <= point.memory * (1 + 1e-9)


def test_the_curve_has_caps_of_its_own_and_refuses_what_it_cannot_use() -> None:
    assert [point.memory for point in search_curve(4, 4, effort=20)] == [1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8]
    with pytest.raises(UsageError, match="numbers above 0"):
        search_curve(4, 4, memory=[0])
    with pytest.raises(UsageError, match=r"largest cap is 0.5, .* one microbatch alone holds 1"):
        search_curve(4, 4, memory=[0.2, 0.5])
    with pytest.raises(UsageError, match="activation is 0, so no cap makes a difference"):
        search_curve(4, 4, Costs(activation=0))
