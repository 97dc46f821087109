"""Connections between two ranks over gloo: one for each direction, and a rank that is lost as it connects is named."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from transport_harness import run, values

from penstock.errors import PeerFailure
from penstock.runtime.transport import Channel
from penstock.runtime.transport.distributed import links

PAIR = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)]


def both_ways(transport: Any) -> Any:
    """How many second connections there are, with channels in one direction and in both, and what came."""
    transport.open(PAIR[:1])
    alone = len(transport._links.seconds)
    transport.open(PAIR)
    there, back = (0, 1) if transport.rank == 0 else (1, 0)
    mine = torch.full((3,), 1.0 + transport.rank)
    transport.send(there, 0, mine)
    other = transport.receive(back, 0)
    transport.flush()
    transport.exchange(None)
    if transport._links.seconds:
        sending, receiving = transport.ends.sending(there), transport.ends.receiving(back)
        assert sending._connection.backend is not receiving._connection.backend
    return alone, len(transport._links.seconds), other.tolist()


def test_each_direction_has_a_connection_of_its_own() -> None:
    """Gloo's thread polls for a connection while the main thread writes to it: half of all that the processes did."""
    assert values(run("distributed", both_ways)) == [(0, 1, [2.0] * 3), (0, 1, [1.0] * 3)]


def test_ranks_that_share_memory_connect_once() -> None:
    assert values(run("shared", both_ways)) == [(0, 0, [2.0] * 3), (0, 0, [1.0] * 3)]


def forked(transport: Any) -> int:
    """How a fork ends that drops the second connection."""
    transport.open(PAIR)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # it may also wait for ever
        transport._opened.clear()
        transport.ends = None
        transport._links.seconds.clear()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    transport.exchange(None)
    return status


def test_a_fork_may_drop_its_copy_of_a_connection() -> None:
    """A worker of a data loader that collected a pipeline aborted: "terminate called", by threads that it never had."""
    assert values(run("distributed", forked)) == [0, 0]


def ring(transport: Any) -> list[list[int]]:
    """Three ranks in a ring, each joined with both others."""
    pairs = [(0, 1), (1, 2), (2, 0)]
    channels = [each for a, b in pairs for each in (Channel(a, b, "F", a, b), Channel(b, a, "B", b, a))]
    transport.open(channels)
    for number, channel in enumerate(channels):
        if channel.source_rank == transport.rank:
            transport.send(number, 0, torch.tensor([number]))
    came = [
        transport.receive(number, 0).tolist()
        for number, channel in enumerate(channels)
        if channel.target_rank == transport.rank
    ]
    transport.flush()
    transport.exchange(None)
    return came


def test_ranks_in_a_ring_connect_without_waiting_for_each_other_in_a_circle() -> None:
    assert values(run("distributed", ring, ranks=3)) == [[[1], [4]], [[0], [3]], [[2], [5]]]


def lost_on_the_way(transport: Any, when: str) -> str:
    if transport.rank == 1 and when == "before":
        os._exit(9)
    if transport.rank == 1:
        links.PrefixStore = lambda *_: os._exit(9)  # type: ignore[misc, assignment]
    with pytest.raises(PeerFailure) as caught:
        transport.open(PAIR)
    return f"{caught.value.rank}: {caught.value.cause}"


@pytest.mark.parametrize(
    ("when", "cause"), [("before", "connection"), ("as it connects", "did not connect to rank 0 within 3 s")]
)
def test_a_rank_that_is_lost_before_it_has_connected_is_named(when: str, cause: str) -> None:
    first, second = run("distributed", lost_on_the_way, timeout=3.0, when=when)
    assert second.silent
    assert first.get().startswith("1: ")
    assert cause in first.get()
