"""Which stage feeds which, and over which links."""

from __future__ import annotations

import pytest

from penstock.errors import UsageError
from penstock.schedule import Link, Placement, Topology, links


def test_a_chain_feeds_each_next_stage() -> None:
    chain = Topology.chain(3)
    assert chain.edges == ((0, 1), (1, 2))
    assert chain.is_chain
    assert not chain.skips
    assert [chain.producers(stage) for stage in range(3)] == [(), (0,), (1,)]
    assert [chain.consumers(stage) for stage in range(3)] == [(1,), (2,), ()]


def test_skips_are_ordinary_edges() -> None:
    net = Topology.chain(4, skips=[(0, 3), (0, 3), (1, 2)])
    assert net.edges == ((0, 1), (0, 3), (1, 2), (2, 3))
    assert net.skips == ((0, 3),)
    assert not net.is_chain
    assert net.producers(3) == (0, 2)
    assert net.consumers(0) == (1, 3)


def test_edges_in_any_order_are_one_value() -> None:
    assert Topology(3, [(1, 2), (0, 1)]) == Topology.chain(3)
    assert hash(Topology(3, [(1, 2), (0, 1)])) == hash(Topology.chain(3))


@pytest.mark.parametrize("edge", [(1, 0), (1, 1), (0, 3), (-1, 0)])
def test_an_edge_goes_to_a_later_stage(edge: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=f"the edge {edge[0]} -> {edge[1]} does not fit 3 stages"):
        Topology(3, [edge])


def test_there_is_at_least_one_stage() -> None:
    with pytest.raises(UsageError, match="at least one stage"):
        Topology(0, [])


def test_edges_within_a_rank_need_no_link() -> None:
    assert [link[:2] for link in links(Placement.v(2), Topology.chain(4))] == [(0, 1), (2, 3)]
    assert links(Placement.v(1, 3), Topology.chain(3)) == ()


def test_one_link_carries_a_value_to_all_its_readers_on_a_rank() -> None:
    net = Topology.chain(4, skips=[(0, 3)])
    assert links(Placement.loop(2, 2), net) == (
        Link(source=0, target=1, source_rank=0, target_rank=1, targets=(1, 3)),
        Link(source=1, target=2, source_rank=1, target_rank=0, targets=(2,)),
        Link(source=2, target=3, source_rank=0, target_rank=1, targets=(3,)),
    )
