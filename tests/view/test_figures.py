"""Figures that several views show: idle time, what is in flight, times with their units."""

from __future__ import annotations

import math
import operator
from itertools import combinations, product

import pytest

from penstock.schedule import FAMILIES, Costs, build, simulate
from penstock.view.figures import COLOURS, idle_shares, in_flight, shades, time_text


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


# What people without one kind of cones see of linear red, green and blue (Machado, Oliveira and Fernandes, 2009).
SIGHTS = {
    "no red cones": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green cones": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "no blue cones": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))


def linear(colour: str) -> list[float]:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def times(rows: tuple[tuple[float, ...], ...], values: list[float]) -> list[float]:
    return [min(1.0, max(0.0, sum(map(operator.mul, row, values)))) for row in rows]


def seen(colour: str, sight: str) -> tuple[float, float, float]:
    """The colour in CIELAB, in which distances are those that people see."""
    values = zip(times(XYZ, times(SIGHTS[sight], linear(colour))), (0.9505, 1.0, 1.089), strict=True)
    x, y, z = (
        share ** (1 / 3) if share > 0.008856 else 7.787 * share + 16 / 116 for share in (a / b for a, b in values)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHTS)
def test_ops_can_be_told_apart_by_people_who_are_colour_blind_in_every_stage(sight: str) -> None:
    """Later stages of a rank are darker: a dark I looked like a light B, 3.8 apart."""
    by_op = [[seen(shade, sight) for shade in shades(colour)] for colour in dict.fromkeys(COLOURS.values())]
    apart = [math.dist(*pair) for one, other in combinations(by_op, 2) for pair in product(one, other)]
    assert min(apart) > 8


def test_dark_letters_are_readable_on_every_colour() -> None:
    dark = times(XYZ, linear("#111111"))[1]
    for colour in COLOURS.values():
        for shade in shades(colour):
            assert (times(XYZ, linear(shade))[1] + 0.05) / (dark + 0.05) > 4.5  # WCAG's contrast for text
