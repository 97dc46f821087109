"""The loss by step as a drawing: every spike, round numbers beside it, words for those who hear it."""

from __future__ import annotations

import math
import re

from penstock.view.curve import Curve


def heights(svg: str, kind: str) -> list[float]:
    found = re.search(rf'class="{kind}" points="([^"]*)"', svg)
    assert found
    return [float(point.split(",")[1]) for point in found[1].split()]


def test_few_steps_are_drawn_one_by_one() -> None:
    svg = Curve([(1, 4.0), (2, 3.0), (3, math.nan), (4, 2.0)], [(2, 3.5), (4, 2.5)]).svg()
    line = heights(svg, "training")
    assert len(line) == 3  # the one that is no number is left out
    assert line == sorted(line)  # down the page as the loss falls
    assert "range" not in svg
    assert svg.count("<circle") == 2
    assert "step 4: validation 2.5, the lowest" in svg
    assert 'aria-label="training loss from 4 in step 1 to 2 in step 4; validation loss at the lowest 2.5' in svg
    assert [float(text) for text in re.findall(r'text-anchor="end">([^<]*)<', svg)] == [2, 2.5, 3, 3.5, 4]


def test_of_many_steps_a_spike_stays_visible() -> None:
    points = [(step, 100.0 if step == 5000 else 1.0) for step in range(1, 10_001)]
    svg = Curve(points).svg()
    assert len(heights(svg, "training")) == 400
    spike, rest = sorted(set(heights(svg, "range")))
    assert rest - spike > 200  # of 260: it reaches up to where 100 is
    assert len(svg) < 20_000


def test_nothing_and_one_loss_are_no_trouble() -> None:
    assert Curve([]).svg() == Curve([(1, math.inf)]).svg() == ""
    assert len(heights(Curve([(7, 0.0)]).svg(), "training")) == 1
    assert len(heights(Curve([(1, 1e-9), (2, 1e-9)]).svg(), "training")) == 2
