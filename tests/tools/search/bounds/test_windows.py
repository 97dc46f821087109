"""Windows of jobs: what the rules may cut off, and what they must leave."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from penstock.tools.search.bounds.windows import Arc, Item, Rules, Windows


def windows(jobs: int, until: float) -> Windows:
    return Windows(np.zeros((jobs, 1)), np.full((jobs, 1), float(until)))


def test_jobs_that_share_a_machine_need_the_sum_of_their_times() -> None:
    rules = Rules([2.0, 3.0], [], [[0, 1]], [])
    assert rules.narrow(windows(2, 4.9))[0]
    assert not rules.narrow(windows(2, 5.0))[0]


def test_a_chain_has_no_slack_at_its_own_length() -> None:
    rules = Rules([1.0, 2.0, 1.0], [Arc(0, 1, 0.5), Arc(1, 2, 0.0)], [], [])
    found = windows(3, 4.5)
    assert not rules.narrow(found)[0]
    assert found.start[:, 0].tolist() == [0.0, 1.5, 3.5]
    assert found.end[:, 0].tolist() == [1.0, 3.5, 4.5]


def test_a_forward_waits_for_room() -> None:
    """Two microbatches on one rank that has room for one: the second F comes after the first W."""
    lengths = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]  # F I W of each
    arcs = [Arc(0, 1, 0), Arc(1, 2, 0), Arc(3, 4, 0), Arc(4, 5, 0), Arc(0, 3, 0), Arc(1, 4, 0), Arc(2, 5, 0)]
    room = (1.0, [Item(0, 1, 2, 1.0, 1.0), Item(3, 4, 5, 1.0, 1.0)])
    found = windows(6, 20.0)
    assert not Rules(lengths, arcs, [], [room]).narrow(found)[0]
    assert found.start[3, 0] == 3.0
    assert found.end[2, 0] == 17.0


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_a_machine_is_lost(seed: int) -> None:
    """Every order of four jobs with heads and tails that ends in time stays within the windows."""
    draw = random.Random(seed)
    jobs = range(4)
    lengths = [float(draw.randint(0, 4)) for _ in jobs]
    heads, tails = ([float(draw.randint(0, 6)) for _ in jobs] for _ in range(2))
    ends = []
    for order in itertools.permutations(jobs):
        starts, now = {}, 0.0
        for job in order:
            starts[job] = max(now, heads[job])
            now = starts[job] + lengths[job]
        ends.append((max(starts[job] + lengths[job] + tails[job] for job in jobs), starts))
    until = sorted(end for end, _ in ends)[5]
    rules = Rules(lengths, [], [list(jobs)], [])
    found = Windows(np.array(heads)[:, None], until - np.array(tails)[:, None])
    assert not rules.narrow(found)[0]
    for end, starts in ends:
        if end <= until:
            for job in jobs:
                assert found.start[job, 0] <= starts[job] + 1e-6
                assert starts[job] + lengths[job] <= found.end[job, 0] + 1e-6
