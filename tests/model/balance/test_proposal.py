"""A better cut after a run: here a simulated one, so that the times are known."""

from __future__ import annotations

import pytest

from penstock.errors import UsageError
from penstock.model.balance.proposal import propose, stage_times
from penstock.schedule import Costs, Placement, build, simulate
from penstock.schedule.timing.timeline import Timeline
from tests.model.balance.loads import loads_of


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
