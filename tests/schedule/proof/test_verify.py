"""The proof: what it refuses, and how it says so."""

from __future__ import annotations

import re

import pytest

from penstock.errors import ScheduleError
from penstock.schedule import Action, Op, Schedule, build, faults, lower, parse, verify


def said(schedule: Schedule) -> list[str]:
    return [str(fault) for fault in faults(schedule)]


def edited(schedule: Schedule, *edits: tuple[int, str, str]) -> Schedule:
    """The schedule with text replaced in ranks' rows, written as in the notation."""
    rows = [" ".join("." if action is None else str(action) for action in row) for row in schedule.rows]
    for rank, old, new in edits:
        assert len(re.findall(rf"(?<!\S){re.escape(old)}(?!\S)", rows[rank])) == 1
        rows[rank] = re.sub(rf"(?<!\S){re.escape(old)}(?!\S)", new, rows[rank])
    return schedule.replace(Schedule.from_text(rows, placement=schedule.placement, microbatches=1).rows)


PROGRAM = lower(build("1f1b", 2, 2))
# rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
# rank 1: 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1


def test_what_is_right_has_no_fault() -> None:
    assert faults(PROGRAM) == []
    verify(PROGRAM)


@pytest.mark.parametrize(
    ("edits", "wanted"),
    [
        (
            [(1, "1RECV_F0 1RECV_F1", "1RECV_F1 1RECV_F0")],
            [
                "rank 0, position 1, 0SEND_F0: is message 0 from rank 0 to rank 1, but the receive posted for that "
                "message is 1RECV_F1 (rank 1, position 0): the two orders differ",
                "rank 0, position 3, 0SEND_F1: is message 1 from rank 0 to rank 1, but the receive posted for that "
                "message is 1RECV_F0 (rank 1, position 1): the two orders differ",
            ],
        ),
        (
            [(0, "0SEND_F0", "0SEND_F1"), (0, "0F1 0SEND_F1", "0F1 0SEND_F0")],
            [
                "rank 0, position 1, 0SEND_F1: stands before 0F1, which it needs",
                "rank 0, position 1, 0SEND_F1: is message 0 from rank 0 to rank 1, but the receive posted for that "
                "message is 1RECV_F0 (rank 1, position 0): the two orders differ",
                "rank 0, position 3, 0SEND_F0: is message 1 from rank 0 to rank 1, but the receive posted for that "
                "message is 1RECV_F1 (rank 1, position 1): the two orders differ",
            ],
        ),
        ([(0, "0SEND_F1", "")], ["rank 1, position 1, 1RECV_F1: has no send 0SEND_F1 on rank 0"]),
        (
            [(0, "0RECV_B1", "")],
            [
                "rank 0, position 6, 0B1: stands before the receive of 1B1 or 1I1 from rank 1, which it needs",
                "rank 1, position 7, 1SEND_B1: has no receive 0RECV_B1 on rank 0",
            ],
        ),
        ([(0, "0SEND_F1", "0SEND_F1 0SEND_F1")], ["rank 0, position 4, 0SEND_F1: is there twice on this link"]),
        (
            [(1, "1RECV_F1", "1RECV_F1 1RECV_F1")],
            [
                "rank 1, position 2, 1RECV_F1: receives what is there already",
                "rank 1, position 2, 1RECV_F1: is there twice on this link",
            ],
        ),
        (
            [(0, "0B1", "")],
            ["rank 0, 0B1: never runs, nor do 0I1 and 0W1"],
        ),
        ([(1, "1F1 1B1", "1F1 1B1 1B1")], ["rank 1, position 7, 1B1: is there twice; it must run once"]),
        (
            [(1, "1B1", "1I1")],
            ["rank 1, 1W1: never runs, but its other half 1I1 does"],
        ),
        (
            [(1, "1B1", "1B1 1W1")],
            ["rank 1, 1B1: is a full backward, yet 1W1 runs too"],
        ),
        ([(1, "1F1 1B1", "1B1 1F1")], ["rank 1, position 5, 1B1: stands before 1F1, which it needs"]),
        (
            [(0, "0SEND_F1", "0SEND_F1 0SEND_B1")],
            ["rank 0, position 4, 0SEND_B1: there is no stage -1 at its other end"],
        ),
        ([(0, "0B1", "0B1 1B1")], ["rank 0, position 8, 1B1: stage 1 lives on rank 1"]),
        ([(0, "0B1", "0B1 7F0")], ["rank 0, position 8, 7F0: there is no stage 7: stages are 0 to 1"]),
    ],
)
def test_each_fault_is_named_with_rank_position_and_action(
    edits: list[tuple[int, str, str]], wanted: list[str]
) -> None:
    assert said(edited(PROGRAM, *edits)) == wanted


def test_all_faults_are_reported_at_once() -> None:
    program = lower(build("1f1b", 3, 3), reduce=True, window=1)
    broken = edited(
        program,
        (0, "0F2", "0F9"),  # out of range, so 0F2 is missing too
        (0, "0REDUCE_GRAD", ""),
        (1, "1SEND_B1", ""),
        (1, "1UNSHARD", ""),
        (2, "2B1", "2B1 2B1"),
        (2, "2RECV_F0 2RECV_F1", "2RECV_F1"),
    )
    with pytest.raises(ScheduleError) as caught:
        verify(broken)
    text = str(caught.value)
    for part in (
        "0F9: microbatch 9 is out of range: there are 3, 0 to 2",
        "rank 0, 0F2: never runs",
        "rank 0, 0REDUCE_GRAD: never runs",
        "0RECV_B1: has no send 1SEND_B1 on rank 1",
        "1F0: stage 1 is sharded here: 1UNSHARD must come first",
        "2B1: is there twice; it must run once",
        "2F0: stands before the receive of 1F0 from rank 1, which it needs",
        "1SEND_F0: has no receive 2RECV_F0 on rank 2",
    ):
        assert part in text, part
    assert text.startswith(f"{len(caught.value.faults)} faults:\n")
    assert all(fault.rank is not None and fault.action is not None for fault in caught.value.faults)


def test_the_message_of_very_many_faults_stays_readable() -> None:
    schedule = build("gpipe", 4, 30)
    empty = schedule.replace([row[:1] for row in schedule.rows[:1]] + [row[:5] for row in schedule.rows[1:]])
    with pytest.raises(ScheduleError) as caught:
        verify(empty)
    assert len(caught.value.faults) > 100
    assert len(str(caught.value).splitlines()) == 42
    assert str(caught.value).endswith("more (all in .faults)")


def test_two_ranks_that_wait_for_each_other_are_drawn_as_a_ring() -> None:
    program = Schedule.from_text(
        [
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        ]
    )
    assert said(program) == [
        "rank 0, position 3, 0SEND_F1: stops here: it waits until its receive is posted (rank 1)",
        "rank 1, position 3, 1SEND_B0: stops here: it waits until its receive is posted (rank 0)",
        "deadlock, each waits for the next: rank 0 -> rank 1 -> rank 0\n"
        "    rank 0 at 0SEND_F1 waits until its receive is posted (rank 1)\n"
        "    rank 1 at 1SEND_B0 waits until its receive is posted (rank 0)",
    ]


def test_a_deadlock_has_its_cycle_as_a_value() -> None:
    """Who waits, where, and at what: for a program, and for an order that has no transfers yet."""
    program = Schedule.from_text(
        [
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1 1SEND_F1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1",
            "2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1 2B1 2SEND_B1",
        ]
    )
    *stuck, deadlock = faults(program)
    assert deadlock.cycle == ((1, 5, Action(1, Op.SEND_F, 1)), (2, 3, Action(2, Op.SEND_B, 0)))
    assert [fault.cycle for fault in stuck] == [()] * 3
    order = faults(Schedule.from_text(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]))
    assert [(each.rank, each.position, str(each.action)) for each in order[-1].cycle] == [(0, 1, "0B0"), (1, 1, "1F1")]


def test_a_ring_is_drawn_without_the_ranks_that_only_wait_for_it() -> None:
    program = Schedule.from_text(
        [
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
            "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1 1SEND_F1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1",
            "2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1 2B1 2SEND_B1",
        ]
    )
    assert said(program)[-1] == (
        "deadlock, each waits for the next: rank 1 -> rank 2 -> rank 1\n"
        "    rank 1 at 1SEND_F1 waits until its receive is posted (rank 2)\n"
        "    rank 2 at 2SEND_B0 waits until its receive is posted (rank 1)"
    )
    assert said(program)[0] == "rank 0, position 5, 0B0: stops here: it waits for 1B0 (rank 1)"


def test_a_compute_order_that_cannot_end_is_refused_without_transfers_too() -> None:
    order = Schedule.from_text(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    assert said(order)[-1].startswith("deadlock, each waits for the next: rank 0 -> rank 1 -> rank 0")


def test_a_compute_on_a_sharded_stage_is_refused() -> None:
    program = lower(build("looped-bfs", 1, 1, 2), window=1)
    # 0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD
    assert said(edited(program, (0, "0RESHARD 1UNSHARD 1F0", "1UNSHARD 0RESHARD 1F0"))) == []
    assert said(edited(program, (0, "0F0 0RESHARD", "0RESHARD 0F0"))) == [
        "rank 0, position 2, 0F0: stage 0 is sharded here: 0UNSHARD must come first"
    ]
    assert said(edited(program, (0, "0RESHARD 1UNSHARD", "1UNSHARD"))) == [
        "rank 0, position 6, 0UNSHARD: stage 0 is whole already"
    ]
    assert said(edited(program, (0, "0B0 0RESHARD", "0B0"))) == [
        "rank 0, position 7, 0UNSHARD: stage 0 is left whole: 0RESHARD is missing"
    ]
    assert said(edited(program, (0, "1RESHARD 0UNSHARD", "1RESHARD 0UNSHARD 1RESHARD"))) == [
        "rank 0, position 8, 1RESHARD: stage 1 is not whole here"
    ]


def test_a_reduction_comes_once_and_last() -> None:
    program = lower(build("gpipe", 1, 2), reduce=True)
    assert said(edited(program, (0, "0B1 0REDUCE_GRAD", "0REDUCE_GRAD 0B1"))) == [
        "rank 0, position 4, 0B1: comes after 0REDUCE_GRAD, which must be last"
    ]
    assert said(edited(program, (0, "0REDUCE_GRAD", "0REDUCE_GRAD 0REDUCE_GRAD"))) == [
        "rank 0, position 5, 0REDUCE_GRAD: is there twice; gradients are reduced once per step"
    ]
    assert said(edited(program, (0, "0REDUCE_GRAD", ""))) == ["rank 0, 0REDUCE_GRAD: never runs"]


def test_a_transfer_within_a_rank_is_refused_as_a_hand_over() -> None:
    program = edited(lower(build("zb-v", 1, 1)), (0, "0F0", "0F0 0SEND_F0"))
    assert said(program) == [
        "rank 0, position 1, 0SEND_F0: stages 0 and 1 both live on rank 0: a hand-over, with no transfer"
    ]


def test_a_transfer_that_the_topology_has_not_is_refused() -> None:
    program = edited(lower(build("forward-only", 3, 1)), (0, "0SEND_F0", "0SEND_F0->2"))
    assert "rank 0, position 1, 0SEND_F0->2: no value goes between stages 0 and 2 in this topology" in said(program)


def test_a_forward_only_schedule_has_no_backward() -> None:
    schedule = build("forward-only", 1, 1)
    extra = schedule.replace([[*schedule.rows[0], parse("0B0")]])
    assert said(extra) == ["rank 0, 0B0: is a backward in a forward-only schedule"]


def test_rows_that_do_not_fit_the_placement_are_refused() -> None:
    schedule = build("1f1b", 3, 2)
    missing = schedule.replace(schedule.rows[:2])
    assert said(missing)[0] == "2 rows for a placement on 3 ranks; give each rank one row"
    assert "stage 2 appears in no row; is the row of its rank missing?" in said(missing)
    blank = schedule.replace([*schedule.rows[:2], [None]])
    assert said(blank)[0] == "rank 2: the row has no action; every rank runs something"
    assert "rank 2, 2F0: never runs" in said(blank)
