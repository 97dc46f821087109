"""Which rank owns which stage."""

from __future__ import annotations

import pytest

from penstock.errors import UsageError
from penstock.schedule import Placement


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Placement.loop(4, 2), "0 1 2 3 0 1 2 3"),
        (Placement.loop(3), "0 1 2"),
        (Placement.v(4, 1), "0 1 2 3"),
        (Placement.v(4, 2), "0 1 2 3 3 2 1 0"),
        (Placement.v(2, 3), "0 1 1 0 0 1"),
        (Placement.v(2, 4), "0 1 1 0 0 1 1 0"),
        (Placement.v(1, 3), "0 0 0"),
        (Placement.block(3, 2), "0 0 1 1 2 2"),
        (Placement([0, 0, 1, 2, 0]), "0 0 1 2 0"),
    ],
)
def test_layouts(placement: Placement, text: str) -> None:
    assert str(placement) == text


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("layout", [Placement.loop, Placement.v, Placement.block])
def test_both_directions_agree(layout: type[Placement], ranks: int, stages_per_rank: int) -> None:
    placement = layout(ranks, stages_per_rank)  # type: ignore[call-arg, arg-type]
    assert placement.ranks == ranks
    assert placement.stages == len(placement) == ranks * stages_per_rank
    assert placement.stages_per_rank == stages_per_rank
    for rank in range(ranks):
        assert len(placement.stages_of(rank)) == stages_per_rank
        assert all(placement.rank_of(stage) == rank for stage in placement.stages_of(rank))
        assert list(placement.stages_of(rank)) == sorted(placement.stages_of(rank))


def test_each_turn_of_a_v_stays_on_one_rank() -> None:
    placement = Placement.v(4, 5)
    turns = range(3, 19, 4)
    assert [placement.rank_of(stage) for stage in turns] == [placement.rank_of(stage + 1) for stage in turns]


def test_custom_maps_may_give_ranks_unequal_numbers_of_stages() -> None:
    placement = Placement([0, 1, 1, 1, 0])
    assert placement.stages_of(0) == (0, 4)
    assert placement.stages_of(1) == (1, 2, 3)
    assert placement.stages_per_rank == 3


def test_equal_maps_are_one_value_however_they_were_made() -> None:
    assert Placement.v(2) == Placement([0, 1, 1, 0]) != Placement.loop(2, 2)
    assert len({Placement.v(2), Placement([0, 1, 1, 0])}) == 1
    with pytest.raises(AttributeError):
        Placement.v(2).ranks = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ([], "at least one stage"),
        ([0, 2], "rank 1 owns no stage .* 0 to 1 without gaps"),
        ([1], "rank 0 owns no stage"),
        ([0, -1], "whole numbers from 0"),
        ([0, 1.0], "whole numbers"),
        ([0, True], "whole numbers"),
        (["0"], "whole numbers"),
    ],
)
def test_maps_that_are_none_are_refused(table: list[int], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Placement(table)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 2), (2.0, 1), (True, 1)])
@pytest.mark.parametrize("layout", [Placement.loop, Placement.v, Placement.block])
def test_sizes_are_whole_numbers_from_1(layout: type[Placement], sizes: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="must be a whole number of at least 1, got"):
        layout(*sizes)  # type: ignore[call-arg, arg-type]


def test_asking_for_what_is_not_there_says_what_is() -> None:
    with pytest.raises(UsageError, match="no stage 4: stages are 0 to 3"):
        Placement.v(2).rank_of(4)
    with pytest.raises(UsageError, match="no stage -1"):
        Placement.v(2).rank_of(-1)
    with pytest.raises(UsageError, match="no rank 2: ranks are 0 to 1"):
        Placement.v(2).stages_of(2)
