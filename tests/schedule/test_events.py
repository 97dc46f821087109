"""Rows of events that wait for each other."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from penstock.schedule import events
from penstock.schedule.events import Waits, run


def waits(*triples: tuple[int, int, float]) -> Waits:
    event, on, delay = zip(*triples, strict=True) if triples else ((), (), ())
    return Waits(np.array(event, dtype=int), np.array(on, dtype=int), np.array(delay, dtype=float))


def test_a_row_runs_in_order_and_waits_where_it_must() -> None:
    """Events 0 and 1 are row 0, events 2 and 3 row 1; event 2 waits for event 0 and 0.5 more, event 1 for event 3."""
    outcome = run(np.array([0, 2, 4]), np.array([1.0, 1.0, 2.0, 1.0]), waits((2, 0, 0.5), (1, 3, 0.0)))
    assert outcome.ends.tolist() == [1, 5.5, 3.5, 4.5]
    assert not outcome.stuck


def test_an_event_waits_for_the_last_of_several() -> None:
    outcome = run(np.array([0, 1, 2, 3]), np.array([1.0, 5.0, 1.0]), waits((2, 0, 9.0), (2, 1, 1.0)))
    assert outcome.ends.tolist() == [1, 5, 11]


def test_a_ring_and_what_never_happens_are_reported_by_the_wait() -> None:
    ring = waits((0, 1, 0.0), (1, 0, 0.0), (2, 3, 0.0))
    outcome = run(np.array([0, 1, 2, 3]), np.ones(3), ring)
    assert outcome.stuck == [(0, 0), (1, 1), (2, 2)]
    assert outcome.ends.tolist() == [-1, -1, -1]


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray, Waits]:
    """Events in a random order, dealt to rows; each waits for up to two earlier ones. Odd seeds have a ring."""
    draw = random.Random(seed)
    rows, size = 70, 70 * 66
    home = sorted(draw.randrange(rows) for _ in range(size))
    starts = np.searchsorted(home, np.arange(rows + 1))
    turn = [draw.random() for _ in range(size)]
    for first, last in pairwise(starts):
        turn[first:last] = sorted(turn[first:last])
    by_turn = sorted(range(size), key=turn.__getitem__)
    found = []
    for place, event in enumerate(by_turn):
        for _ in range(draw.choice((0, 0, 1, 2)) if place else 0):
            found.append((event, by_turn[draw.randrange(place)], draw.choice((0.0, 0.25))))
    if seed % 2:
        found.append((int(starts[rows // 2]), int(starts[rows // 2 + 1]) - 1, 0.0))
    return starts, np.array([draw.choice((0.0, 1.0, 2.5)) for _ in range(size)]), waits(*found)


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_are_run_together_end_as_those_that_are_run_in_turn(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(seed)
    monkeypatch.setattr(events, "MANY", 2)
    together = run(*case)
    monkeypatch.setattr(events, "MANY", 10**9)
    in_turn = run(*case)
    assert together.ends.tolist() == in_turn.ends.tolist()
    assert together.stuck == in_turn.stuck
    assert bool(in_turn.stuck) == bool(seed % 2)
