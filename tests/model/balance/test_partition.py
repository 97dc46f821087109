"""What cannot be cut is refused with numbers, and what pieces may weigh."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ModelError, UsageError
from penstock.model.balance.partition import counts_of, in_flight, partition
from penstock.schedule import Placement, build, simulate


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=6, max_size=10), st.lists(st.integers(0, 9), min_size=10, max_size=10))
def test_weights_may_differ_from_stage_to_stage(first, other):
    rows = [first, other[: len(first)], first]

    def largest(cuts):
        bounds = [0, *cuts, len(first)]
        return max(sum(rows[s][bounds[s] : bounds[s + 1]]) for s in range(3))

    assert largest(partition(rows, 3).cuts) == min(map(largest, combinations(range(1, len(first)), 2)))


def test_a_rank_half_as_fast_gets_half_as_much():
    assert counts_of(partition([1] * 10, 3, speeds=[1, 1, 0.5]).cuts, 10) == [4, 4, 2]


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
    code = "import sys, penstock.model.balance.partition; assert 'torch' not in sys.modules"
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
