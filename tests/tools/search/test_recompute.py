"""Memory bought with time: stages whose forward runs again in the backward."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.schedule import Costs, Op, Schedule, build, lower, lower_bound, search, search_report, simulate, verify

COSTS = Costs(forward=2.0, input=2.0, weight=1.0, hop=0.1, kept=0.1)


def peak_by_hand(schedule: Schedule, costs: Costs, rank: int) -> float:
    """The most that is held at any moment of a rank's order, counted for each microbatch by itself."""
    activation, held, kept = (costs.per_stage(name, schedule.stages) for name in ("activation", "held", "kept"))
    now: dict[tuple[int, int], float] = {}
    most = 0.0
    for action in (part for whole in schedule.rank(rank) if whole is not None for part in whole.parts()):
        stage, key = action.stage, (action.stage, action.microbatch)
        if action.op is Op.F:
            now[key] = kept[stage] if stage in schedule.recompute else activation[stage]
        elif action.op is Op.I:
            now[key] = max(activation[stage], held[stage])
            most = max(most, sum(now.values()))
            now[key] = held[stage]
        else:
            now[key] = max(now[key], activation[stage]) if action.op is Op.B else now[key]
            most = max(most, sum(now.values()))
            del now[key]
        most = max(most, sum(now.values()))
    return most


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe-v", "interleaved-1f1b"])
@pytest.mark.parametrize("held", [None, 0.0, 0.4])
def test_the_simulator_counts_time_and_memory_of_recomputing(name: str, held: float | None) -> None:
    costs = Costs(forward=2.0, input=3.0, weight=1.0, held=held, kept=0.25)
    plain = build(name, 3, 5)
    for again in ([0], [1, 2], range(plain.stages)):
        schedule = plain.replace(recompute=again)
        timeline = simulate(schedule, costs)
        for span in timeline.spans:
            backward = span.action.op in (Op.I, Op.B)
            more = 2.0 if backward and span.action.stage in schedule.recompute else 0.0
            base = {Op.F: 2.0, Op.I: 3.0, Op.W: 1.0, Op.B: 4.0}[span.action.op]
            assert span.length == pytest.approx(base + more)
        assert timeline.peak_memory == pytest.approx([peak_by_hand(schedule, costs, rank) for rank in range(3)])


def test_a_measured_run_tells_the_costs_without_the_forward_that_ran_again() -> None:
    for name in ("1f1b", "zb-h1"):
        costs = Costs(forward=2.0, input=1.5, weight=1.5, hop=0.0)
        schedule = build(name, 3, 6).replace(recompute=[0, 1])
        timeline = simulate(schedule, costs)
        found = Costs.from_timeline(timeline)
        assert found.input == pytest.approx((1.5,) * 3)
        assert found.weight == pytest.approx((1.5,) * 3)
        assert simulate(schedule, found).makespan == pytest.approx(timeline.makespan)


@pytest.mark.slow
def test_a_tight_cap_is_worth_some_recomputing() -> None:
    never = search_report(4, 12, COSTS, memory=1.5, effort=400)
    free = search_report(4, 12, COSTS, memory=1.5, effort=400, recompute=True)
    assert not never.schedule.recompute
    assert free.schedule.recompute == frozenset(free.chosen.recompute) != frozenset()
    assert free.value < 0.9 * never.value
    verify(lower(free.schedule))


def test_where_memory_suffices_nothing_is_recomputed() -> None:
    found = search_report(4, 12, COSTS, memory=8, effort=500, stages_per_rank=1, recompute=True)
    assert not found.schedule.recompute
    assert found.proved
    assert not search(4, 12, COSTS, seconds=0, recompute=True).recompute  # no cap at all


def test_a_cap_that_only_recomputing_can_meet() -> None:
    costs = Costs(forward=2.0, input=2.0, weight=1.0, activation=1.0, held=0.0, kept=0.1)
    with pytest.raises(UsageError, match=r"one microbatch alone holds .*, recompute=True, or cut the model"):
        search(3, 6, costs, memory=0.7, seconds=0)
    found = search_report(3, 6, costs, memory=0.7, effort=500, recompute=True)
    assert max(found.timeline.peak_memory) <= 0.7 + 1e-9


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_the_answer_keeps_to_the_cap_and_above_the_bound(data: st.DataObject) -> None:
    check_answer(data)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_many_more_answers_keep_to_the_cap_and_above_the_bound(data: st.DataObject) -> None:
    check_answer(data)


def check_answer(data: st.DataObject) -> None:
    ranks, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    number = st.integers(1, 40).map(lambda tenths: tenths / 10)
    costs = Costs(
        forward=data.draw(number),
        input=data.draw(number),
        weight=data.draw(number),
        hop=data.draw(st.sampled_from([0.0, 0.3])),
        held=data.draw(st.sampled_from([None, 0.0, 0.5, 1.5])),
        kept=data.draw(st.sampled_from([0.0, 0.2, 1.0])),
    )
    memory = data.draw(st.integers(16, 60)) / 10
    span = data.draw(st.booleans())
    found = search_report(
        ranks, microbatches, costs, memory, effort=200, recompute=True, objective="span" if span else "makespan"
    )
    verify(lower(found.schedule))
    timeline = simulate(found.schedule, found.costs)
    assert max(timeline.peak_memory) <= memory * (1 + 1e-9)
    assert timeline.peak_memory == pytest.approx(
        [peak_by_hand(found.schedule, found.costs, rank) for rank in range(ranks)]
    )
    schedule = found.schedule
    bound = lower_bound(schedule.placement, microbatches, found.costs, memory, span=span, recompute=schedule.recompute)
    assert found.value >= bound * (1 - 1e-9) >= found.lower_bound * (1 - 2e-9)
