"""The cut that keeps the most loaded rank as light as can be, against all cuts there are."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ModelError, UsageError
from penstock.model.balance.proposal import (
    counts_of,
    in_flight,
    partition,
    propose,
    stage_times,
)
from penstock.schedule import Costs, Placement, build, simulate
from penstock.schedule.timing.timeline import Timeline


def loads_of(weights, cuts, placement, speeds):
    bounds = [0, *cuts, len(weights)]
    loads = [0.0] * placement.ranks
    for stage, rank in enumerate(placement):
        loads[rank] += sum(weights[bounds[stage] : bounds[stage + 1]]) / speeds[rank]
    return loads


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


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=6, max_size=10), st.lists(st.integers(0, 9), min_size=10, max_size=10))
def test_weights_may_differ_from_stage_to_stage_and_stages_may_carry_something_anyway(first, other):
    rows = [first, other[: len(first)], first]
    base = [0, 5, 3]

    def largest(cuts):
        bounds = [0, *cuts, len(first)]
        return max(base[s] + sum(rows[s][bounds[s] : bounds[s + 1]]) for s in range(3))

    assert largest(partition(rows, 3, base=base).cuts) == min(map(largest, combinations(range(1, len(first)), 2)))


def test_a_rank_half_as_fast_gets_half_as_much():
    assert counts_of(partition([1] * 10, 3, speeds=[1, 1, 0.5]).cuts, 10) == [4, 4, 2]


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


def test_more_rounds_come_close_to_an_even_share():
    weights = [1 + (n * 7919) % 97 / 97 for n in range(60)]
    assert partition(weights, 16, placement=Placement.loop(4, 4)).largest < sum(weights) / 4 * 1.01


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        (([1, 2], 3), {}, "2 pieces cannot make 3 stages; pass stages=2 or fewer"),
        (
            ([1, 2, 3], 3),
            {"allowed": [2]},
            "3 pieces with 1 places to cut cannot make 3 stages; pass stages=2 or fewer",
        ),
        (([], 1), {}, "no pieces"),
        (([1, -2, 3], 2), {}, "piece 1 weighs -2"),
        (([1, float("nan")], 2), {}, "piece 1 weighs nan"),
        (([1, 2, 3], 2), {"speeds": [1]}, "1 entries for 2 ranks"),
        (([1, 2, 3], 2), {"speeds": [1, 0]}, "above 0"),
        (([1, 2, 3], 2), {"placement": Placement([0, 1, 0])}, "for 3 stages, not 2"),
        (([1, 2, 3], 0), {}, "at least 1 stage"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_numbers(arguments, options, says):
    with pytest.raises((ModelError, UsageError), match=says):
        partition(*arguments, **options)


def test_nothing_of_it_needs_torch():
    code = "import sys, penstock.model.balance.proposal; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_in_flight_counts_what_a_stage_holds_at_its_ranks_peak():
    assert in_flight(build("gpipe", 3, 5)) == [5, 5, 5]
    assert in_flight(build("1f1b", 3, 5)) == [3, 2, 1]
    assert in_flight(build("forward-only", 3, 5)) == [1, 1, 1]
    for name in ("zb-v", "interleaved-1f1b"):
        schedule = build(name, 4, 8, 2)
        held, peaks = in_flight(schedule), simulate(schedule).peak_activations
        for rank in range(4):
            assert sum(held[stage] for stage in schedule.placement.stages_of(rank)) == peaks[rank]


# -- from a run: here a simulated one, so that the times are known


def run_of(times, name="1f1b", ranks=None, **options) -> Timeline:
    schedule = build(name, ranks or len(times), 8, **options)
    forward = [time / 3 for time in times]
    return simulate(schedule, Costs(forward=forward, input=forward, weight=forward))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_stage_times_are_forward_and_backward_of_a_microbatch(name):
    assert stage_times(run_of([3, 6, 9], name)) == pytest.approx([3, 6, 9])


def test_a_proposal_weighs_the_pieces_as_measured_and_says_the_gain():
    # by parameters these 6 pieces weigh the same; the run showed that the first three take three times as long
    found = propose([100] * 6, [3], run_of([9, 3]))
    assert found.weights == pytest.approx((3, 3, 3, 1, 1, 1))
    assert found.loads_before == pytest.approx((9, 3))
    assert found.cuts == (2,)
    assert found.loads == pytest.approx((6, 6))
    assert found.gain == pytest.approx(1.5)
    assert found.changes
    assert str(found) == "[2, 4] instead of [3, 3] pieces per stage, 9 on the most loaded rank: 6, 1.50 times faster"


def test_where_nothing_is_better_the_cut_stays():
    found = propose([1, 1, 5, 1], [2], run_of([2, 2]))
    assert not found.changes
    assert found.cuts == (2,)
    assert found.gain == 1
    assert str(found).startswith("nothing better than [2, 2]")


def test_pieces_of_a_stage_without_weight_share_its_time_evenly():
    assert propose([0, 0, 1], [2], run_of([4, 1])).weights == pytest.approx((2, 2, 1))


def test_a_proposal_sums_over_a_ranks_stages():
    timeline = run_of([8, 2, 2, 4], "zb-v", ranks=2)
    found = propose([1] * 8, [2, 4, 6], timeline)
    assert found.loads_before == pytest.approx((12, 4))
    assert max(found.loads) == pytest.approx(max(loads_of(found.weights, found.cuts, Placement.v(2), [1, 1])))
    assert found.gain == pytest.approx(12 / max(found.loads))
    assert found.gain > 1.3


def test_cuts_that_are_not_those_of_the_run_are_refused():
    with pytest.raises(UsageError, match="make 3 stages; the timeline is of 2"):
        propose([1] * 6, [2, 4], run_of([1, 1]))
