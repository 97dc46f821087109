"""How long computes keep their ranks."""

from __future__ import annotations

import pytest

from penstock.schedule import Op, Schedule, Span, Timeline, parse
from penstock.schedule.timing.occupied import occupied


def timeline(text: str, *times: tuple[float, float, float]) -> Timeline:
    """One rank's actions, each with its start, its end, and how long it waited before."""
    spans = (Span(0, parse(each), *time) for each, time in zip(text.split(), times, strict=True))
    return Timeline(Schedule.from_text([text]), tuple(spans))


def test_a_compute_keeps_its_rank_until_the_next_one_without_what_that_waits_for() -> None:
    found = occupied(timeline("0F0 0F1 0B0 0B1", (0, 1, 0), (1.5, 2.5, 0), (6, 8, 3), (8, 10, 0)))
    assert found[Op.F, 0] == pytest.approx([1.5, 1.5])  # the second: 0B0 began to wait at 3
    assert found[Op.B, 0] == pytest.approx([2.0])  # the last one of a rank says nothing, as the end of the step follows


def test_the_last_compute_of_a_rank_counts_where_there_is_no_other() -> None:
    assert occupied(timeline("0F0 0B0", (0, 1, 0), (1, 4, 0))) == {(Op.F, 0): [1.0], (Op.B, 0): [3.0]}
