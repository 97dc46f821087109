"""When the n-th microbatch can be somewhere at the earliest, and what must follow: bounds worked out by hand."""

from __future__ import annotations

import math

import pytest

from penstock.schedule import Costs, Placement
from penstock.tools.search.bounds.heads_and_tails import paced_bound

FREE = math.inf


def test_one_rank_has_all_of_its_work_to_do() -> None:
    assert paced_bound(Placement.loop(1), 3, Costs(1, 2, 3), [FREE]) == pytest.approx(3 * 6)


def test_one_microbatch_goes_there_and_back() -> None:
    """Two forwards, two input backwards, two hops; the first stage's W comes last."""
    assert paced_bound(Placement.loop(2), 1, Costs(1, 2, 3, hop=0.5), [FREE] * 2) == pytest.approx(
        1 + 1 + 2 + 2 + 1 + 3
    )


def test_the_last_rank_starts_late() -> None:
    """Four ranks: the last one waits for three forwards and then has all of its microbatches."""
    assert paced_bound(Placement.loop(4), 8, Costs(1, 1, 1), [FREE] * 4) == pytest.approx(3 + 8 * 3)


def test_room_for_one_microbatch_makes_a_pipeline_a_queue() -> None:
    """Every microbatch waits for the W of the one before on the first rank."""
    each = 1 + 1 + 1 + 1 + 1  # F F I I W on the first rank
    assert paced_bound(Placement.loop(2), 5, Costs(), [1.0, 1.0]) == pytest.approx(5 * each)


def test_a_slow_link_is_a_machine_of_its_own() -> None:
    """Messages that take 10 queue: eight of them one after the other, whatever the ranks do."""
    costs = Costs(links=[[0, 10], [0, 0]])
    bound = paced_bound(Placement.loop(2), 8, costs, [FREE] * 2)
    assert bound >= 1 + 8 * 10
    assert bound > paced_bound(Placement.loop(2), 8, Costs(hop=10), [FREE] * 2)


def test_what_would_take_too_long_has_no_bound_here() -> None:
    assert paced_bound(Placement.loop(2), 10**6, Costs(), [FREE] * 2) == 0.0
