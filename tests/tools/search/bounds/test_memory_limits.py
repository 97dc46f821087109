"""What a cap says of how many microbatches can be under way: limits worked out by hand."""

from __future__ import annotations

import sys

from penstock.schedule.timing.costs import Costs
from penstock.tools.search.bounds.memory_limits import Limit, limits_of


def limits(own: list[int], costs: Costs, away: list[float], cap: float) -> list[tuple[int, Limit]]:
    return list(limits_of(own, costs, away, cap))


def test_one_stage_that_holds_until_w_lets_in_as_many_as_fit() -> None:
    """Room for three whole microbatches: the fourth F waits for the first I and the W after it."""
    found = limits([0], Costs(1.0, 1.0, 2.0), [0.0], 3.5)
    assert (0, Limit(3, 0, 2.0)) in found
    assert (0, Limit(3, 0, 0.0, weight=True)) in found


def test_what_i_gives_back_shortens_the_wait() -> None:
    """Where nothing stays between I and W, the next F waits for I alone, and for no W."""
    found = limits([0], Costs(held=0.0), [0.0], 3.0)
    assert (0, Limit(3, 0, 0.0)) in found
    assert {limit.most for stage, limit in found if limit.weight} == {sys.maxsize}


def test_two_stages_of_a_rank_share_its_room() -> None:
    """A microbatch at the second stage also holds what the first made for it: two of them fit into five, not five."""
    found = limits([0, 1], Costs(), [1.0, 0.0], 5.0)
    assert max(limit.most for stage, limit in found if (stage, limit.stage, limit.weight) == (1, 1, False)) == 2
    assert (0, Limit(4, 1, 1.0)) in found  # one with both, three more with the first stage only


def test_where_one_at_a_time_fits_the_rank_makes_room_in_between() -> None:
    """Room for one microbatch and no more: the next one's F follow after both I and both W."""
    found = limits([0, 1], Costs(), [1.0, 0.0], 2.0)
    assert (1, Limit(1, 1, 1.0 + 1.0 + 2.0)) in found


def test_there_is_always_one() -> None:
    assert all(limit.most >= 1 for _, limit in limits([0], Costs(activation=9.0), [0.0], 1.0))
