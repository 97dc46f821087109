"""Steps back to back: where ranks do not wait for each other, a step costs its period and not its makespan."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError, UsageError
from penstock.schedule import Costs, Schedule, build, faults, lower, simulate, steady_state, verify
from penstock.schedule.builders import TRAINING
from penstock.schedule.repeated import repeated


def test_two_steps_of_a_tiny_schedule_are_drawn_one_after_the_other():
    twice = repeated(Schedule(["0F0 0B0 . 0F1 0B1"]), 2)
    assert twice == Schedule(["0F0 0B0 . 0F1 0B1 0F2 0B2 . 0F3 0B3"])
    assert twice.microbatches == 4


def test_a_pair_stays_a_pair_and_a_message_keeps_its_peer():
    program = lower(build("dualpipe-v", 2, 4))
    twice = repeated(program, 2)
    for once, both in zip(program.rows, twice.rows, strict=True):
        assert both[: len(once)] == once
        shifted = both[len(once) :]
        assert [action.op for action in shifted] == [action.op for action in once]
        assert [action.peer for action in shifted] == [action.peer for action in once]


@pytest.mark.parametrize("family", TRAINING)
def test_every_family_is_proved_over_adjacent_steps(family):
    schedule = build(family, 3, 5)
    assert faults(schedule, steps=2) == faults(lower(schedule), steps=3) == []
    assert verify(lower(schedule), steps=2) == verify(lower(schedule))


def test_a_fault_of_one_step_is_reported_once_and_not_per_step():
    with pytest.raises(ScheduleError) as once:
        verify(Schedule(["0F0 0B0 0F1"]))
    with pytest.raises(ScheduleError) as twice:
        verify(Schedule(["0F0 0B0 0F1"]), steps=2)
    assert str(once.value) == str(twice.value)


def test_one_rank_is_never_idle_and_its_period_is_its_work():
    found = steady_state(build("1f1b", 1, 3), Costs(forward=2.0))
    assert (found.period, found.idle) == (pytest.approx(12.0), pytest.approx(0.0))


def test_zb_h2_pays_its_bubble_once_and_1f1b_every_step():
    """The first rank of 1f1b starts first and ends last; in zb-h2 all ranks take the same time, one after another."""
    zero, plain = build("zb-h2", 4, 8), build("1f1b", 4, 8)
    assert simulate(zero).bubble > 0.1
    assert steady_state(zero).idle == pytest.approx(0.0)
    assert steady_state(plain).idle == pytest.approx(simulate(plain).bubble)


@pytest.mark.parametrize("family", TRAINING)
def test_the_period_is_between_the_work_of_a_rank_and_the_makespan(family):
    schedule, costs = build(family, 3, 5), Costs(forward=1.25, input=1.0, weight=0.75, hop=0.1)
    once, found = simulate(schedule, costs), steady_state(schedule, costs)
    assert max(once.busy) <= found.period * (1 + 1e-9)
    assert found.period <= once.makespan * (1 + 1e-9)
    assert 0.0 <= found.idle <= once.bubble + 1e-9


def test_the_update_comes_between_the_steps_of_a_rank_and_counts_as_work():
    """1f1b on one rank: 3 microbatches of 3, and an update of 1 between two steps."""
    schedule = build("1f1b", 1, 3)
    assert simulate(schedule, steps=2, update=1.0).makespan == pytest.approx(9 + 1 + 9)
    found = steady_state(schedule, update=1.0)
    assert (found.period, found.idle) == (pytest.approx(10.0), pytest.approx(0.0))


def test_an_update_in_a_bubble_costs_nothing():
    """The last rank of 1f1b waits between two steps for as long as the pipeline fills and drains."""
    schedule = build("1f1b", 4, 8)
    period = steady_state(schedule).period
    assert steady_state(schedule, update=1.0).period == pytest.approx(period + 1.0)  # that of the first rank
    timeline = simulate(schedule, steps=2, update=1.0)
    row = timeline.by_rank[3]
    assert row[len(row) // 2].start - row[len(row) // 2 - 1].end > 1.0


def test_microbatches_of_different_sizes_have_them_in_every_step():
    schedule, costs = build("gpipe", 1, 2), Costs(sizes=(1.0, 3.0))
    assert simulate(schedule, costs, steps=3).makespan == pytest.approx(3 * simulate(schedule, costs).makespan)


@pytest.mark.parametrize("odd", [{"steps": 0}, {"steps": 1.5}, {"steps": 2, "update": -1.0}])
def test_odd_numbers_of_steps_and_odd_updates_are_refused(odd):
    with pytest.raises(UsageError, match=r"steps|update"):
        simulate(build("1f1b", 2, 2), **odd)
