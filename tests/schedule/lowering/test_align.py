"""From a compute order to the grid of time slots."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.schedule import FAMILIES, Schedule, align, build, verify


def test_idle_slots_fall_where_a_rank_must_wait() -> None:
    order = Schedule.from_text(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
    assert align(order).draw() == (
        "slot   0   1   2   3   4   5\n"
        "rank 0 0F0 0F1 .   0B0 .   0B1\n"
        "rank 1 .   1F0 1B0 1F1 1B1 ."
    )  # fmt: skip


def test_idle_slots_that_were_given_do_not_matter() -> None:
    loose = Schedule.from_text(["0F0 . . . 0B0", ". . 1F0 . 1B0"])
    assert align(loose) == build("1f1b", 2, 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_aligning_again_changes_nothing_and_loses_nothing(name: str) -> None:
    schedule = build(name, 4, 6)
    assert align(schedule.compute()) == align(schedule) == schedule
    assert len(set(map(len, schedule.rows))) == 1
    verify(schedule)


def test_overlapped_pairs_are_kept_as_they_are() -> None:
    order = Schedule.from_text(["0F0 0F1 (0F2;0B0) 0B1 0B2", "1F0 1B0 (1B1;1F2) 1F1 1B2"], microbatches=3)
    with pytest.raises(ScheduleError, match="stops here"):
        align(order)
    order = Schedule.from_text(["0F0 0F1 (0F2;0B0) 0B1 0B2", "1F0 1B0 1F1 (1B1;1F2) 1B2"])
    aligned = align(order)
    assert aligned.draw() == (
        "slot   0   1   2   3         4         5   6\n"
        "rank 0 0F0 0F1 .   (0F2;0B0) .         0B1 0B2\n"
        "rank 1 .   1F0 1B0 1F1       (1B1;1F2) 1B2 ."
    )
    assert aligned.compute() == order


def test_skip_edges_are_waited_for() -> None:
    plain = Schedule.from_text(["0F0 0F1", "1F0 1F1", "2F0 2F1"])
    assert align(plain).slots == 4
    order = Schedule.from_text(["0F0 0F1 3F0 3F1", "1F0 1F1", "2F0 2F1"])
    assert align(order).slots == 5


def test_an_order_that_cannot_finish_says_where_it_stops() -> None:
    order = Schedule.from_text(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    with pytest.raises(ScheduleError) as caught:
        align(order)
    assert str(caught.value) == (
        "3 faults:\n"
        "  rank 0, position 1, 0B0: stops here: it waits for 1B0, which is at position 2 of rank 1\n"
        "  rank 1, position 1, 1F1: stops here: it waits for 0F1, which is at position 2 of rank 0\n"
        "  deadlock, each waits for the next: rank 0 -> rank 1 -> rank 0\n"
        "    rank 0 at 0B0 waits for 1B0 of rank 1\n"
        "    rank 1 at 1F1 waits for 0F1 of rank 0"
    )


def test_a_producer_that_nobody_runs_is_said_to_be_missing() -> None:
    order = Schedule.from_text(["0F0 0B0 0B1", "1F0 1F1 1B0 1B1"], microbatches=2)
    with pytest.raises(ScheduleError, match="1F1: stops here: it waits for 0F1, which no rank runs"):
        align(order)


def test_an_order_of_foreign_stages_is_refused_before_it_is_run() -> None:
    order = Schedule.from_text(["0F0 1B0", "1F0 0B0"], placement=[0, 1])
    with pytest.raises(ScheduleError, match=r"2 faults:.*\n.*1B0: stage 1 lives on rank 1"):
        align(order)
