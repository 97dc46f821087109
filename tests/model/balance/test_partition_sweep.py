"""The cut that keeps the most loaded rank as light as can be, against all cuts there are."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.balance.partition import counts_of, partition
from penstock.schedule import Placement
from tests.model.balance.loads import loads_of


def brute(weights, stages, allowed, crossing, placement, speeds):
    """(largest load, bytes) of the best of all cuts."""
    return min(
        (round(max(loads_of(weights, cuts, placement, speeds)), 6), sum(crossing[cut] for cut in cuts))
        for cuts in combinations(allowed, stages - 1)
    )


@pytest.mark.parametrize(
    ("weights", "stages", "largest"),
    [
        ([5] * 7 + [50], 2, 50),  # torchgpipe's balancer: 65
        ([10] * 6 + [40, 10], 3, 50),  # torchgpipe's: 70
        ([10, 10, 1, 3, 10, 20, 3, 0, 1], 4, 20),  # DeepSpeed's, which evens out differences: 24
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 3, 17),
        ([7], 1, 7),
        ([0, 0, 0], 3, 0),
    ],
)
def test_the_largest_stage_is_as_light_as_can_be(weights, stages, largest):
    found = partition(weights, stages)
    assert found.exact
    assert found.largest == largest
    assert max(sum(weights[a:b]) for a, b in zip([0, *found.cuts], [*found.cuts, len(weights)], strict=True)) == largest


def test_ten_equal_layers_make_exactly_as_many_stages_as_asked_for():
    for stages in range(1, 11):
        counts = counts_of(partition([1] * 10, stages).cuts, 10)
        assert len(counts) == stages
        assert sum(counts) == 10
        assert max(counts) == -(-10 // stages)
        assert min(counts) >= 1


@st.composite
def problems(draw):
    ranks, rounds = draw(
        st.sampled_from([(1, 1), (2, 1), (3, 1), (5, 1), (2, 2), (3, 2), (4, 2), (2, 3), (3, 3), (1, 3)])
    )
    stages = ranks * rounds
    kind = draw(st.sampled_from(["loop", "v", "block", "own"]))
    if kind == "own":
        placement = Placement(draw(st.permutations(list(range(ranks)) * rounds)))
    else:
        placement = getattr(Placement, kind)(ranks, rounds)
    count = draw(st.integers(stages, max(stages, 11)))
    # Sixty-fourths add up exactly, so that a tie in the load is a tie for brute force as well.
    one = st.integers(0, 12) if draw(st.booleans()) else st.integers(0, 640).map(lambda part: part / 64)
    weights = draw(st.lists(one, min_size=count, max_size=count))
    crossing = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    allowed = sorted(draw(st.sets(st.integers(1, count - 1), min_size=stages - 1))) if count > 1 else []
    speeds = draw(st.lists(st.sampled_from([1, 1, 0.5, 2]), min_size=ranks, max_size=ranks))
    return weights, stages, allowed, crossing, placement, speeds


@settings(max_examples=40, deadline=None)
@given(problems())
def test_brute_force_finds_nothing_better_in_load_or_then_in_bytes(problem):
    check_by_brute_force(problem)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(problems())
def test_brute_force_finds_nothing_better_in_many_more_cases(problem):
    check_by_brute_force(problem)


def check_by_brute_force(problem):
    weights, stages, allowed, crossing, placement, speeds = problem
    found = partition(weights, stages, allowed=allowed, crossing=crossing, placement=placement, speeds=speeds)
    assert found.exact
    assert set(found.cuts) <= set(allowed)
    assert len(set(found.cuts)) == stages - 1
    assert found.loads == pytest.approx(loads_of(weights, found.cuts, placement, speeds))
    assert (round(found.largest, 6), found.crossing) == brute(weights, stages, allowed, crossing, placement, speeds)


def test_a_v_pairs_the_first_stage_with_the_last():
    weights = [6, 1, 1, 1, 1, 1, 1, 4]  # a heavy embedding and a heavy head, both on rank 0
    found = partition(weights, 4, placement=Placement.v(2))
    assert found.loads == (10, 6)
    assert counts_of(found.cuts, 8)[0] == counts_of(found.cuts, 8)[3] == 1
    assert partition(weights, 4, placement=Placement.loop(2, 2)).largest == 8


def test_among_equals_the_fewest_bytes_cross():
    crossing = [0, 9, 9, 1, 9, 9]
    assert partition([1, 0, 0, 0, 0, 1], 2, crossing=crossing).cuts == (3,)


def test_slack_trades_a_little_balance_for_fewer_bytes():
    weights, crossing = [10, 10, 10.1, 10], [0, 50, 100, 1]
    assert partition(weights, 2, crossing=crossing).cuts == (2,)
    assert partition(weights, 2, crossing=crossing, slack=0.6).cuts == (3,)


@pytest.mark.parametrize("placement", [Placement.v(4), Placement.loop(4, 2)])
def test_a_hundred_uneven_pieces_are_still_proved_where_ranks_have_two_stages(placement):
    weights = [1 + (n * 7919) % 97 / 97 for n in range(100)]
    found = partition(weights, 8, placement=placement)
    assert found.exact
    assert found.largest < sum(weights) / 4 * 1.01


def test_forty_uneven_pieces_are_proved_where_ranks_have_three_stages():
    weights = [1 + (n * 7919) % 97 / 97 for n in range(40)]
    found = partition(weights, 12, placement=Placement.loop(4, 3))
    assert found.exact
    assert found.largest < sum(weights) / 4 * 1.001


@pytest.mark.slow
def test_more_rounds_come_close_to_an_even_share():
    weights = [1 + (n * 7919) % 97 / 97 for n in range(60)]
    assert partition(weights, 16, placement=Placement.loop(4, 4)).largest < sum(weights) / 4 * 1.01
