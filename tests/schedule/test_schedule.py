"""Schedules as frozen values."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.errors import ScheduleError, UsageError
from penstock.schedule import FAMILIES, Placement, Schedule, Topology, build, lower, parse, verify

SMALL = """
0F0 0F1 .   0B0 .   0B1
.   1F0 1B0 1F1 1B1 .
"""


def test_a_hand_written_schedule_is_the_built_one() -> None:
    schedule = Schedule.from_text(SMALL)
    assert schedule == build("1f1b", ranks=2, microbatches=2)
    assert (schedule.ranks, schedule.stages, schedule.microbatches, schedule.slots) == (2, 2, 2, 6)
    assert schedule.rank(1) == (None, parse("1F0"), parse("1B0"), parse("1F1"), parse("1B1"), None)
    verify(schedule)


def test_what_is_not_said_is_read_off_the_actions() -> None:
    schedule = Schedule.from_text(["0F0 3F0 0F1 3F1", "1F0 2F0 1F1 2F1"])
    assert schedule.placement == Placement.v(2)
    assert schedule.microbatches == 2
    assert schedule.forward_only
    assert schedule.topology.is_chain
    assert schedule.passes == frozenset()


def test_transfers_in_the_rows_tell_skips_and_passes() -> None:
    program = lower(build("1f1b", 3, 2, skips=[(0, 2)]), reduce=True, window=1)
    again = Schedule(program.rows)
    assert again == program
    assert again.topology.skips == ((0, 2),)
    assert again.passes == {"transfers", "reductions", "shards"}


def test_a_hand_written_program_cannot_be_lowered_twice() -> None:
    program = Schedule.from_text(["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"])
    verify(program)
    with pytest.raises(UsageError, match=r"lowered already \(transfers\)"):
        lower(program)
    assert lower(program.compute()) == program


def test_it_is_frozen_and_hashable() -> None:
    schedule = build("zb-v", 3, 4)
    assert len({schedule, build("zb-v", 3, 4), build("ZBV", ranks=3, microbatches=4)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.microbatches = 5  # type: ignore[misc]
    assert all(isinstance(row, tuple) for row in schedule.rows)
    assert schedule != schedule.replace(microbatches=5)


def test_equal_means_equal_rows_and_equal_meaning() -> None:
    schedule = build("1f1b", 3, 2)
    assert schedule != build("1f1b", 3, 2, skips=[(0, 2)])
    assert schedule == schedule.replace(name="mine")
    assert schedule != lower(schedule)


def test_compute_keeps_only_the_order_of_the_computes() -> None:
    for name in FAMILIES:
        schedule = build(name, 3, 4)
        order = schedule.compute()
        assert lower(schedule, reduce=True, window=2).compute() == order
        assert not order.passes
        assert [[action for action in row if action] for row in schedule.rows] == [list(row) for row in order.rows]


def test_parts_open_overlapped_pairs() -> None:
    schedule = Schedule.from_text("(0F0;0B1) . 0F1", microbatches=2)
    assert [(rank, position, str(part)) for rank, position, part in schedule.parts()] == [
        (0, 0, "0F0"),
        (0, 0, "0B1"),
        (0, 2, "0F1"),
    ]


def test_replace_keeps_what_the_schedule_is_meant_to_be() -> None:
    schedule = lower(build("zb-h1", 2, 3))
    shorter = schedule.replace(row[:-1] for row in schedule.rows)
    assert (shorter.placement, shorter.microbatches) == (schedule.placement, 3)
    assert shorter.passes == {"transfers"}
    assert shorter.name == "zb-h1"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Schedule([]), "at least one row"),
        (lambda: Schedule([[None]]), "no action in any row"),
        (lambda: Schedule.from_text("0B0"), "no forward.*pass microbatches="),
        (lambda: Schedule.from_text("90F0"), "number them from 0 without gaps"),
        (lambda: Schedule.from_text([".", "0F0"]), "rank 0: the row has no stage"),
        (lambda: Schedule.from_text("0F0", microbatches=0), "microbatches must be a whole number of at least 1"),
        (lambda: Schedule.from_text("0F0", topology=Topology.chain(2)), "topology has 2 stages and the placement 1"),
        (lambda: Schedule.from_text("0F0").rank(1), "no rank 1: this schedule has ranks 0 to 0"),
    ],
)
def test_what_is_no_schedule_is_refused(make: object, why: str) -> None:
    assert callable(make)
    with pytest.raises((ScheduleError, UsageError), match=why):
        make()


def test_a_placement_may_be_given_as_a_plain_list() -> None:
    schedule = Schedule.from_text("0F0 1F0", placement=[0, 0])
    assert schedule.placement == Placement([0, 0])


def test_repr_says_what_it_is_for() -> None:
    assert repr(build("zb-v", 2, 3)) == "<Schedule zb-v ranks=2 stages=4 microbatches=3>"
    assert repr(Schedule.from_text("0F0")) == "<Schedule ranks=1 stages=1 microbatches=1>"


def test_messages_are_what_crosses_from_rank_to_rank_in_order() -> None:
    program = lower(build("zb-v", 2, 2))  # stages 0 and 3 on rank 0, the turn on rank 1
    there, back = program.messages(0, 1), program.messages(1, 0)
    assert sorted(map(str, there)) == ["0SEND_F0", "0SEND_F1", "3SEND_B0", "3SEND_B1"]
    assert sorted(map(str, back)) == ["1SEND_B0", "1SEND_B1", "2SEND_F0", "2SEND_F1"]
    assert list(there) == [action for action in program.rows[0] if action in there]
    assert program.messages(0, 0) == ()
    with pytest.raises(UsageError, match="has no transfers yet"):
        build("zb-v", 2, 2).messages(0, 1)
    with pytest.raises(UsageError, match="target=2: pass one of the ranks 0 to 1"):
        program.messages(0, 2)
