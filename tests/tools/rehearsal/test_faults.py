"""Planned faults and their text."""

from __future__ import annotations

import math

import pytest

from penstock.errors import UsageError
from penstock.schedule import parse
from penstock.tools.rehearsal.faults import PlannedFault, parse_fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("die 3 at 12.5", PlannedFault("die", 12.5, 3)),
        ("stop 3 at 12.5 for 40", PlannedFault("stop", 12.5, 3, seconds=40)),
        ("stall 0 at 0B2 in step 2", PlannedFault("stall", parse("0B2"), 0, step=2)),
        ("slow 3 at 10 by 2.5 for 5", PlannedFault("slow", 10.0, 3, seconds=5, factor=2.5)),
        ("fail 3 at 3F7", PlannedFault("fail", parse("3F7"), 3)),
        ("lose 2SEND_F4->5", PlannedFault("lose", parse("2SEND_F4->5"))),
        ("reorder 2SEND_B4 in step 1", PlannedFault("reorder", parse("2SEND_B4"), step=1)),
    ],
)
def test_a_fault_is_read_and_written(text: str, fault: PlannedFault) -> None:
    assert parse_fault(text) == fault
    assert str(fault) == text
    assert fault.is_fatal == (fault.kind == "die" or (fault.kind == "stall" and fault.seconds == math.inf))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("explode 3 at 4", "is no fault; write it as 'die 3 at 12.5'"),
        ("die 3", "is no fault"),
        ("die 3 at soon", "neither a time nor an action"),
        ("die 3 at 4 for 2", "'for' is for what ends again"),
        ("slow 3 at 4", "'by' says how slow"),
        ("die 3 at 4 by 2", "'by' says how slow"),
        ("stop 3 at 4 for 1.2.3", "not a number"),
    ],
)
def test_a_text_that_is_no_fault_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_fault(text)
