"""Stages that take their batch in one piece: their sends wait for their last compute, and the program still ends."""

from __future__ import annotations

import pytest

from penstock.errors import UsageError
from penstock.schedule import Schedule, build, lower, verify
from penstock.schedule.lowering.gather import gather, in_turn


def test_the_pass_moves_sends_and_stays_proved() -> None:
    def words(program: Schedule) -> list[str]:
        return [" ".join(str(action) for action in row if action is not None) for row in program.rows]

    plain = lower(build("gpipe", 3, 2))
    rows = words(gather(plain, [1]))
    assert rows[1].replace("1RECV_F0 1RECV_F1 ", "").startswith("1F0 1F1 1SEND_F0 1SEND_F1")
    assert rows[1].endswith("1B0 1B1 1SEND_B0 1SEND_B1")
    assert rows[::2] == words(plain)[::2]
    for ranks in (2, 3, 4):
        for microbatches in (1, 2, 5):
            verify(gather(lower(build("gpipe", ranks, microbatches)), range(ranks)))
            verify(gather(lower(build("looped-bfs", ranks, microbatches, 2)), range(2 * ranks)))


def test_a_program_without_such_stages_or_with_one_microbatch_is_left_alone() -> None:
    for schedule, stages in ((build("1f1b", 3, 4), []), (build("1f1b", 3, 1), [1])):
        program = lower(schedule)
        assert gather(program, stages) is program
        assert in_turn(schedule, stages) is schedule


def test_a_schedule_that_runs_back_before_its_last_forward_is_refused_with_those_that_do_not() -> None:
    with pytest.raises(UsageError, match=r"in 1f1b rank \d runs \dF\d after a backward: .*\(.*gpipe"):
        gather(lower(build("1f1b", 3, 4)), [1])


def test_a_backward_in_two_parts_is_refused() -> None:
    split = Schedule.from_text(["0F0 0F1 0I0 0W0 0I1 0W1"])
    with pytest.raises(UsageError, match=r"cannot be split into I and W as .* does; use gpipe"):
        gather(lower(split), [0])


def test_on_a_rank_with_two_stages_the_second_waits_for_all_of_the_first() -> None:
    schedule = Schedule.from_text(["0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"])
    computes = [str(action) for action in in_turn(schedule, [0]).compute().rows[0] if action is not None]
    assert computes == ["0F0", "0F1", "1F0", "1F1", "1B0", "0B0", "1B1", "0B1"]
    computes = [str(action) for action in in_turn(schedule, [1]).compute().rows[0] if action is not None]
    assert computes == ["0F0", "1F0", "0F1", "1F1", "1B0", "1B1", "0B0", "0B1"]
