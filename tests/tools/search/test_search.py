"""The search: never worse than what is known, never better than the bound, and on small pipelines the best there is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import by_turns, in_tiers, mostly_slow
from tools.search.exact_optimum import optimum

from penstock.errors import UsageError
from penstock.schedule import (
    FAMILIES,
    Costs,
    Placement,
    Schedule,
    build,
    family,
    lower,
    lower_bound,
    search,
    search_report,
    simulate,
    stage_costs,
    verify,
)
from penstock.schedule.builders import TRAINING

ROUNDING = 1 + 1e-9
# ms, as profiled and published: ranks, microbatches, F, I, W, hop
PUBLISHED = {
    "8 ranks": (8, 24, 18.522, 18.086, 9.337, 0.601),
    "16 ranks": (16, 64, 11.307, 11.254, 8.101, 0.379),
}
ROWS = pytest.mark.parametrize("row", PUBLISHED.values(), ids=PUBLISHED)


def costs_of(row: Sequence[float]) -> Costs:
    return Costs(forward=row[2], input=row[3], weight=row[4], hop=row[5])


def longest_span(schedule: Schedule, costs: Costs) -> float:
    return max(row[-1].end - row[0].start for row in simulate(schedule, costs).by_rank)


# what it returns


@pytest.mark.parametrize(
    ("ranks", "microbatches", "memory"),
    by_turns(
        [(1, 1), (1, 3), (2, 1), (3, 2), (4, 7), (5, 12)],
        [None, 1.0, 2.5],
        fast=[(1, 1, 1.0), (2, 1, None), (3, 2, 2.5), (4, 7, 1.0)],
        one_in=1,
    ),
)
def test_the_answer_is_an_ordinary_schedule_within_the_cap(ranks: int, microbatches: int, memory: float | None) -> None:
    costs = Costs(forward=1.0, input=1.1, weight=0.7, hop=0.05)
    found = search_report(ranks, microbatches, costs, memory, effort=500)
    verify(found.schedule)
    verify(lower(found.schedule))
    assert found.schedule.name == "auto"
    timeline = simulate(found.schedule, found.costs)
    assert timeline.makespan == pytest.approx(found.value)
    assert found.makespan == timeline.makespan
    assert memory is None or max(timeline.peak_memory) <= memory * ROUNDING
    assert found.lower_bound <= found.value * ROUNDING
    assert found.gap == pytest.approx(found.value / found.lower_bound - 1, abs=1e-9)
    assert found.chosen.value == found.value


def test_search_gives_the_schedule_and_the_report_the_rest() -> None:
    facts = {"ranks": 2, "microbatches": 4, "costs": Costs(weight=0.5), "memory": 2}
    assert search(**facts, seconds=0) == search_report(**facts, seconds=0).schedule


def test_without_time_it_is_the_same_every_time() -> None:
    runs = {search(4, 8, Costs(weight=0.6, hop=0.1), 4, seconds=0) for _ in range(2)}
    assert len(runs) == 1


@pytest.mark.slow
def test_an_effort_in_orders_gives_the_same_answer_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs(forward=1.0, input=1.1, weight=0.7, hop=0.2)
    first, again = (search_report(3, 7, costs, 2, effort=2000) for _ in range(2))
    assert (first.schedule, first.tried) == (again.schedule, again.tried)
    monkeypatch.setattr("time.thread_time", lambda: 0.0)  # no clock has a say
    assert search_report(3, 7, costs, 2, effort=2000).tried == first.tried
    assert 2000 <= sum(tried.orders for tried in first.tried) < 2010
    assert search_report(3, 7, costs, 2, effort=4000).value <= first.value


def test_auto_can_be_built_and_family_says_how_to_search() -> None:
    schedule = build("auto", 3, 6)
    verify(lower(schedule))
    assert max(simulate(schedule).peak_activations) <= 3 * schedule.placement.stages_per_rank
    assert build("Auto", 3, 6, 2).stages == 6
    with pytest.raises(UsageError, match=r"penstock\.schedule\.search"):
        family("auto")
    skipping = build("auto", 3, 6, skips=[(0, 2)])
    verify(lower(skipping))
    assert skipping.topology.skips == ((0, 2),)


def test_progress_is_told_and_never_goes_back() -> None:
    calls: list[tuple[float, float, float]] = []
    found = search_report(4, 8, Costs(weight=0.5, hop=0.1), 3, effort=2000, progress=lambda *call: calls.append(call))
    values = [value for _, value, _ in calls]
    assert values == sorted(values, reverse=True)
    assert values[-1] == found.value
    assert {bound for _, _, bound in calls} == {found.lower_bound}


# costs and memory


def test_costs_are_of_a_whole_rank() -> None:
    costs = stage_costs(Costs(forward=4, input=6, weight=2, hop=1, activation=8, held=4), 2)
    assert costs == Costs(forward=2, input=3, weight=1, hop=1, activation=4, held=2)


def test_costs_by_stage_say_how_many_stages_there_are() -> None:
    costs = Costs(forward=[1, 2, 3, 4], input=[1, 2, 3, 4], weight=[1, 1, 1, 1], activation=[1, 1, 1, 1])
    found = search_report(2, 5, costs, memory=4, effort=500)
    assert {tried.stages_per_rank for tried in found.tried} == {2}
    assert found.costs == costs
    with pytest.raises(UsageError, match=r"forward is for 4 stages and .*, but 3 ranks"):
        search(3, 5, costs)


def test_memory_in_bytes_and_what_stays_between_i_and_w() -> None:
    gigabyte = 2.0**30
    costs = Costs(weight=0.8, activation=3 * gigabyte, held=gigabyte)
    caps = [4.5 * gigabyte, 9.0 * gigabyte, 4.5 * gigabyte]
    schedule = search_report(3, 6, costs, memory=caps, stages_per_rank=(1, 2, 3, 4), effort=2000)
    peaks = simulate(schedule.schedule, schedule.costs).peak_memory
    assert all(peak <= cap * ROUNDING for peak, cap in zip(peaks, caps, strict=True))
    assert peaks[1] > caps[0]  # the one with more uses it


def test_links_with_bandwidth_are_priced_as_the_simulator_does() -> None:
    costs = Costs(weight=0.5, latency=0.1, bandwidth=10.0, bytes=8.0)
    found = search_report(4, 8, costs, memory=6, effort=1000)
    assert simulate(found.schedule, found.costs).makespan == pytest.approx(found.value)


def test_the_span_can_be_the_objective() -> None:
    costs = Costs(forward=1.0, input=1.0, weight=0.4, hop=0.2)
    found = search_report(4, 10, costs, memory=4, objective="span", effort=2000)
    assert longest_span(found.schedule, found.costs) == pytest.approx(found.value)
    assert found.lower_bound <= found.value * ROUNDING
    for name in TRAINING:
        schedule = build(name, 4, 10)
        each = stage_costs(costs, schedule.placement.stages_per_rank)
        if max(simulate(schedule, each).peak_memory) <= 4 * ROUNDING:
            assert found.value <= longest_span(schedule, each) * ROUNDING


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"memory": 0.5}, "one microbatch alone holds 1 there"),
        ({"memory": [4, 4]}, "memory has 2 numbers for 3 ranks"),
        ({"memory": -1}, "memory must be a number above 0"),
        ({"memory": ["4", "4", "4"]}, "memory must be a number above 0, got '4'"),
        ({"memory": True}, "memory must be a number above 0, got True"),
        ({"memory": "8GiB"}, "memory must be a number above 0, got '8GiB'"),
        ({"memory": {0: 4, 1: 4, 2: 4}}, "memory must be a number above 0, got {0: 4"),
        ({"speeds": []}, "speeds is about layers"),
        ({"layers": [1, float("nan"), 1]}, "layer 1 is nan"),
        ({"links": [1, 2, 3]}, "one row of numbers per rank"),
        (
            {"costs": Costs(sizes=[1, 2, 3, 9]), "memory": 4},
            "the largest microbatch alone holds 9 there; give at least that much, recompute=True",
        ),
        ({"costs": {"forward": 1}}, "costs must be a Costs"),
        ({"costs": Costs(1e308, 1e308, 1e308)}, "too large to be added up"),
        ({"recompute": "yes"}, "recompute is True or False"),
        ({"stages_per_rank": 2.0}, "stages_per_rank must be a whole number"),
        ({"placements": None}, "no placement None"),
        ({"seconds": "1"}, "seconds must be a number of 0 or more"),
        ({"stages_per_rank": ()}, "nothing to try"),
        ({"stages_per_rank": (0,)}, "stages_per_rank must be a whole number"),
        ({"placements": ("w",)}, "no placement 'w'"),
        ({"effort": 0}, "effort must be a whole number of at least 1"),
        ({"effort": 10.0}, "effort must be a whole number"),
        ({"seconds": -1}, "seconds must be a number of 0 or more"),
        ({"objective": "memory"}, "makespan, span or steady"),
        ({"microbatches": 0}, "microbatches must be a whole number"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(facts: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        search(**{"ranks": 3, "microbatches": 4, **facts})  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_is_held_for_w_may_be_more_than_the_activation() -> None:
    """The gradients of outputs stay too. A full backward never holds both, so 1f1b fits where no split one does."""
    costs = Costs(forward=1.0, input=1.0, weight=0.5, held=1.25)
    only = search_report(2, 6, costs, memory=[2.0, 1.2], stages_per_rank=1, seconds=0)
    assert only.value == simulate(build("1f1b", 2, 6), costs).makespan
    mixed = Costs(forward=1.31, input=2.0, weight=3.03, held=1.2)  # dualpipe-v has both kinds of backward
    pairs = simulate(build("dualpipe-v", 2, 6), stage_costs(mixed, 2)).makespan
    assert search_report(2, 6, mixed, 2.585, 2, "v", seconds=0).value <= pairs * ROUNDING
    for ranks, memory in ((1, 1.2), (2, 2.2), (3, 3.0), (4, 4.5), (4, 5.0)):
        for objective in ("makespan", "span"):
            found = search_report(ranks, 6, costs, memory, (1, 2), seconds=0, objective=objective)  # type: ignore[arg-type]
            assert max(found.timeline.peak_memory) <= memory * ROUNDING
            assert found.lower_bound <= found.value * ROUNDING
            assert found.chosen.value == found.value
            verify(lower(found.schedule))
            for name in TRAINING:
                for per_rank in (2,) if FAMILIES[name].layout != "block" else (1,):
                    schedule, each = build(name, ranks, 6, per_rank), stage_costs(costs, per_rank)
                    timeline = simulate(schedule, each)
                    value = timeline.makespan if objective == "makespan" else longest_span(schedule, each)
                    if max(timeline.peak_memory) <= memory:
                        assert found.value <= value * ROUNDING, (name, per_rank)


# the bound


def test_the_bound_without_a_cap_is_work_and_fill() -> None:
    costs = stage_costs(Costs(forward=3, input=4, weight=2, hop=0.5), 2)
    for placement in (Placement.loop(4, 2), Placement.v(4, 2)):
        assert lower_bound(placement, 20, costs) == pytest.approx(20 * 9 + 3 * (1.5 + 0.5))


@ROWS
def test_the_bound_under_a_cap_is_reached_with_one_stage_a_rank(row: Sequence[float]) -> None:
    """The first row's makespan of 1310.405 was proved by a solver; the bound proves both without one."""
    ranks, microbatches, forward, backward, weight, hop = row
    assert isinstance(ranks, int)
    assert isinstance(microbatches, int)
    bound = lower_bound(Placement.loop(ranks), microbatches, costs_of(row), ranks)
    work = microbatches * (forward + backward + weight)
    assert bound == pytest.approx(work + (ranks - 1) * (forward + backward - weight + 4 * hop))
    assert bound == pytest.approx({8: 1310.405, 16: 2202.008}[ranks])


numbers = st.floats(0.0, 10.0, allow_nan=False).map(lambda value: round(value, 3))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_family_beats_the_bound(data: st.DataObject) -> None:
    no_family_beats_the_bound(data, quick=True)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_no_family_beats_the_bound_by_refutation(data: st.DataObject) -> None:
    no_family_beats_the_bound(data, quick=False)


def no_family_beats_the_bound(data: st.DataObject, *, quick: bool) -> None:
    name = data.draw(st.sampled_from(TRAINING))
    per_rank = data.draw(st.integers(1, 3)) if FAMILIES[name].layout != "v" else 2
    schedule = build(name, data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9)), per_rank)
    lists = st.lists(numbers, min_size=schedule.stages, max_size=schedule.stages)
    values = {key: data.draw(numbers | lists) for key in ("forward", "input", "weight", "activation")}
    held = data.draw(st.sampled_from((None, 0.5, 0.0)))
    if held is not None:
        sizes = Costs(activation=values["activation"]).per_stage("activation", schedule.stages)
        values["held"] = [held * size for size in sizes]
    costs = Costs(**values, hop=data.draw(numbers))
    timeline = simulate(schedule, costs)
    for memory in (None, [max(peak, 1e-6) for peak in timeline.peak_memory]):
        bound = lower_bound(schedule.placement, schedule.microbatches, costs, memory, quick=quick)
        assert bound <= timeline.makespan * ROUNDING + 1e-9
        bound = lower_bound(schedule.placement, schedule.microbatches, costs, memory, span=True, quick=quick)
        assert bound <= longest_span(schedule, costs) * ROUNDING + 1e-9


# never worse than what is known


@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 11),
    st.floats(0.3, 2.0),
    st.floats(0.0, 2.0),
    st.floats(0.0, 0.5),
    st.sampled_from((None, 0.34, 0.5, 1.0, 1.3, 2.0)),
)
def test_never_worse_than_any_family_that_fits(
    ranks: int, microbatches: int, backward: float, weight: float, hop: float, share: float | None
) -> None:
    costs = Costs(forward=1.0, input=backward, weight=weight, hop=hop)
    memory = None if share is None else max(1.0, share * ranks)
    found = search_report(ranks, microbatches, costs, memory, seconds=0)
    for name in TRAINING:
        for per_rank in (2,) if FAMILIES[name].layout == "v" else (1, 2, 3, 4):
            schedule = build(name, ranks, microbatches, per_rank)
            timeline = simulate(schedule, stage_costs(costs, per_rank))
            if memory is None or max(timeline.peak_memory) <= memory * ROUNDING:
                assert found.value <= timeline.makespan * ROUNDING, (name, per_rank)


# the best there is


def small_case(seed: int) -> tuple[Placement, str, int, Costs, int | None]:
    """A pipeline that a solver can finish, with whole numbers for costs."""
    draw = random.Random(seed)
    ranks, per_rank, kind = draw.choice((1, 2, 2, 3, 3)), draw.choice((1, 2)), draw.choice(("loop", "v"))
    placement = (Placement.loop if kind == "loop" else Placement.v)(ranks, per_rank)
    stages, uneven = placement.stages, draw.random() < 0.4

    def times(low: int, high: int) -> list[int]:
        each = [draw.randint(low, high) for _ in range(stages)]
        return each if uneven else each[:1] * stages

    activation = times(1, 3) if draw.random() < 0.4 else [2] * stages
    held = [min(size, draw.randint(0, 3)) for size in activation] if draw.random() < 0.4 else activation
    costs = Costs(times(1, 9), times(1, 9), times(0, 9), hop=draw.randint(0, 3), activation=activation, held=held)
    least = max(sum(activation[stage] for stage in placement.stages_of(rank)) for rank in range(ranks))
    memory = draw.choice((None, least, least + draw.randint(0, 4), 2 * least))
    return placement, kind, draw.randint(1, 4), costs, memory


def check_small_case(seed: int) -> None:
    placement, kind, microbatches, costs, memory = small_case(seed)
    best = optimum(placement, microbatches, costs, memory)
    size = placement.stages_per_rank
    found = search_report(placement.ranks, microbatches, costs, memory, size, kind, seconds=0)
    for effort in (10_000, 30_000, 300_000, 3_000_000):  # it cannot know that it is there where the bound is lower
        if found.value > best + 1e-6:
            found = search_report(placement.ranks, microbatches, costs, memory, size, kind, effort=effort)
    assert found.value == pytest.approx(best)
    assert found.lower_bound <= best * ROUNDING


@pytest.mark.parametrize("seed", in_tiers(range(12), range(1, 9), [9]))  # of which one takes as long as the rest
def test_small_pipelines_get_the_best_schedule_there_is(seed: int) -> None:
    check_small_case(seed)


@pytest.mark.timeout(1200)
@pytest.mark.exhaustive  # four of these take the exact solver as long as a hundred other slow tests
@pytest.mark.parametrize("count", [40])
def test_many_small_pipelines_get_the_best_schedule_there_is(count: int) -> None:
    for seed in range(100, 100 + count):
        check_small_case(seed)


@ROWS
def test_published_costs_with_one_stage_a_rank_are_solved(row: Sequence[float]) -> None:
    ranks, microbatches = int(row[0]), int(row[1])
    capped = search_report(ranks, microbatches, costs_of(row), ranks, 1, effort=2000)
    assert capped.proved
    assert max(simulate(capped.schedule, capped.costs).peak_memory) <= ranks
    double = search_report(ranks, microbatches, costs_of(row), 2 * ranks, 1, effort=2000)
    assert double.makespan == pytest.approx(microbatches * sum(row[2:5]) + (ranks - 1) * (row[2] + row[5]))


@pytest.mark.parametrize("name", mostly_slow(PUBLISHED, "8 ranks"))
def test_published_costs_with_several_stages_a_rank_idle_little(name: str) -> None:
    row = PUBLISHED[name]
    ranks, microbatches = int(row[0]), int(row[1])
    found = search_report(ranks, microbatches, costs_of(row), ranks, seconds=0)
    assert max(found.timeline.peak_memory) <= ranks * ROUNDING
    assert found.timeline.bubble < {8: 0.070, 16: 0.050}[ranks]


# large ones


@pytest.mark.parametrize(
    ("ranks", "microbatches"),
    [pytest.param(32, 256, marks=pytest.mark.slow), pytest.param(128, 512, marks=pytest.mark.exhaustive)],
)
def test_large_pipelines_have_a_good_answer(ranks: int, microbatches: int) -> None:
    found = search_report(ranks, microbatches, Costs(11.0, 11.0, 8.0, hop=0.4), ranks, effort=10)
    assert found.gap < 0.02


def test_where_an_order_takes_long_few_families_are_built_and_little_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (8, 32, Costs(11.0, 11.0, 8.0, hop=0.4), 8)
    sizes = {"stages_per_rank": (2, 3, 4), "placements": "loop", "seconds": 0}
    every = search_report(*arguments, **sizes)
    monkeypatch.setattr(import_module("penstock.tools.search.placement_search"), "LARGE", 0)
    few = search_report(*arguments, **sizes)
    assert few.value <= 1.005 * simulate(build("interleaved-zb", 8, 32, 4), stage_costs(arguments[2], 4)).makespan
    assert sum(tried.orders for tried in few.tried) < 0.2 * sum(tried.orders for tried in every.tried)


def test_pairs_that_save_time_are_valued_and_found() -> None:
    alone, paired = (search_report(4, 16, Costs(overlap=overlap), seconds=0) for overlap in (None, 0.55))
    assert paired.value < 0.85 * alone.value
    assert any(action is not None and action.pair is not None for action in paired.schedule.rank(0))
    assert paired.value == paired.timeline.makespan >= paired.lower_bound
    verify(lower(paired.schedule))


@pytest.mark.parametrize(("stages_per_rank", "memory"), [(1, 3.0), (2, 3.0), (3, 5.0)])
def test_families_with_pairs_are_tried_for_each_number_of_stages(stages_per_rank: int, memory: float) -> None:
    costs = Costs(overlap=0.3, hop=0.1)
    family = build("interleaved-1f1b", 2, 6, stages_per_rank, overlap_b_f=True)
    built = simulate(family, stage_costs(costs, stages_per_rank))
    assert max(built.peak_memory) <= memory
    found = search_report(2, 6, costs, memory, stages_per_rank, effort=1)
    assert found.value <= built.makespan * (1 + 1e-9)
    assert max(found.timeline.peak_memory) <= memory


def test_an_overlap_that_names_no_pair_changes_nothing() -> None:
    plain, unnamed = (search_report(2, 3, Costs(overlap=overlap), effort=5) for overlap in (None, {}))
    assert (plain.value, plain.lower_bound) == (unnamed.value, unnamed.lower_bound)


def test_bytes_by_edge_fix_the_number_of_stages() -> None:
    sizes = {(stage, stage + 1): 0.1 for stage in range(7)}
    found = search(4, 8, Costs(bandwidth=1.0, bytes=sizes), seconds=0)
    assert found.stages == 8
    with pytest.raises(UsageError, match="bytes is for 8 stages, but 3 ranks"):
        search(3, 8, Costs(bandwidth=1.0, bytes=sizes), seconds=0)
