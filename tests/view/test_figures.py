"""Figures that several views show: idle time, what is in flight, times with their units."""

from __future__ import annotations

import pytest

from penstock.schedule import FAMILIES, Costs, build, simulate
from penstock.view.figures import idle_shares, in_flight, time_text


def test_idle_time_is_told_by_what_it_is_for() -> None:
    shares = idle_shares(simulate(build("gpipe", 3, 2)))
    assert [round(share.fill, 3) for share in shares] == [0, 0.083, 0.167]
    assert [round(share.drain, 3) for share in shares] == [0, 0.167, 0.333]
    assert [share.total for share in shares] == pytest.approx([0.5] * 3)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_in_flight_peaks_where_the_timeline_says(name: str) -> None:
    timeline = simulate(build(name, 4, 7), Costs(hop=0.1))
    for rank, peak in enumerate(timeline.peak_activations):
        curve = in_flight(timeline, rank)
        assert max(level for _, level in curve) == peak
        assert curve[-1][1] == 0
        assert [time for time, _ in curve] == sorted({time for time, _ in curve})


def test_times_are_told_in_a_fitting_unit() -> None:
    assert [time_text(value, "s") for value in (0, 2.5, 0.0123456, 5e-6)] == ["0 s", "2.5 s", "12.35 ms", "5 us"]
    assert [time_text(value, "s") for value in (0.99999, 0.00099999)] == ["1 s", "1 ms"]
    assert time_text(3, "") == "3"
