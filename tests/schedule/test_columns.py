"""Actions as flat arrays, and back."""

from __future__ import annotations

import copy
import pickle

import pytest

from penstock.errors import NotationError
from penstock.schedule import FAMILIES, Schedule, build, lower
from penstock.schedule.columns import Columns


def again(schedule: Schedule) -> Schedule:
    """The same schedule with nothing but its columns."""
    return schedule.replace(Columns.of(schedule.rows))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_rows_made_of_columns_are_the_rows(name: str) -> None:
    for schedule in (build(name, 3, 5), lower(build(name, 3, 5), reduce=True, window=1)):
        other = again(schedule)
        assert other.rows == schedule.rows
        assert (other.ranks, other.slots, other.ops) == (schedule.ranks, schedule.slots, schedule.ops)


def test_a_pair_and_an_idle_slot_in_one_row_are_told_apart() -> None:
    schedule = Schedule.from_text("0F0 . (0F1;0B0) 0B1")
    assert again(schedule).rows == schedule.rows
    assert schedule.compute().draw().split("\n")[1] == "rank 0 0F0 (0F1;0B0) 0B1"


def test_skipping_transfers_and_sharding_come_back() -> None:
    program = lower(build("1f1b", 4, 2, skips=[(0, 2), (0, 3)]), reduce=True, window=1)
    assert "0SEND_F0->2" in map(str, program.rank(0))
    assert again(program).rows == program.rows


def test_schedules_are_equal_by_what_they_hold_however_they_hold_it() -> None:
    rows, columns = build("zb-v", 2, 3), again(build("zb-v", 2, 3))
    assert rows == columns
    assert hash(rows) == hash(columns)
    assert rows != build("zb-v", 2, 4)
    assert again(Schedule.from_text("0F0 0B0")) != again(Schedule.from_text("0F0 . 0B0"))
    assert again(rows) != again(rows.replace(recompute=[0]))
    for copied in (copy.deepcopy(columns), pickle.loads(pickle.dumps(columns))):
        assert copied == rows
        assert copied.rows == rows.rows


def test_numbers_that_no_array_holds_are_refused_as_written() -> None:
    with pytest.raises(NotationError, match=f"row 1, column 2: '0F{10**12}' is not an action: .* most 2,147,483,647"):
        Schedule([["0F0", f"0F{10**12}", "0B0"]], microbatches=1, placement=[0])
