"""Links on virtual time: when a message is there, in which order, and what is seen of a rank that has gone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from penstock.tools.rehearsal.network import CLOSED, STORE_LATENCY, TIMED_OUT, Backend, Network, Parcel, Store
from penstock.tools.rehearsal.virtual_time import VirtualTime

LONG = timedelta(seconds=100)
LATENCY = 0.5


def played(*ranks: Callable[[Network], Any]) -> list[Any]:
    """What each of these ranks, which are tasks on one network, returned or raised."""
    time = VirtualTime(seed=0)
    network, ended = Network(time, lambda source, target: LATENCY), {}

    def play(rank: int) -> None:
        try:
            ended[rank] = ranks[rank](network)
        except RuntimeError as error:
            ended[rank] = str(error), time.now

    for rank in range(len(ranks)):
        time.start(rank, lambda rank=rank: play(rank))  # type: ignore[misc]
    time.run(lambda: len(ended) == len(ranks), until=1000)
    time.close()
    return [ended[rank] for rank in range(len(ranks))]


def receiver(count: int, limit: timedelta = LONG) -> Callable[[Network], Any]:
    """A rank 1 that receives so many messages of rank 0, with the time of each."""

    def receive(network: Network) -> list[tuple[Any, float]]:
        found = []
        for _ in range(count):
            wire = Backend(network, 1).recv([], 0, 7)
            wire.wait(limit)
            found.append((wire.take(), network.time.now))
        return found

    return receive


def sender(*parcels: Parcel) -> Callable[[Network], Any]:
    """A rank 0 that sends these to rank 1, one after the other without a wait."""

    def send(network: Network) -> None:
        for parcel in parcels:
            Backend(network, 0).send([parcel], 1, 7)

    return send


def test_a_message_occupies_its_link_and_the_next_one_queues_for_it() -> None:
    _, found = played(sender(Parcel("a", 2.0, LATENCY), Parcel("b", 3.0, LATENCY)), receiver(2))
    assert found == [("a", 2.5), ("b", 5.5)]


def test_messages_of_a_wire_come_in_their_order_whatever_each_takes() -> None:
    _, found = played(sender(Parcel("slow", 0.0, 9.0), Parcel("fast", 0.0, 1.0)), receiver(2))
    assert found == [("slow", 9.0), ("fast", 9.0)]


@pytest.mark.parametrize(
    ("fate", "wanted"),
    [("", ["a", "b", "c"]), ("lose", ["b", "c"]), ("duplicate", ["a", "a", "b", "c"]), ("reorder", ["b", "a", "c"])],
)
def test_a_fault_loses_doubles_or_delays_a_message(fate: str, wanted: list[str]) -> None:
    parcels = [Parcel("a", 0.0, 1.0, fate), Parcel("b", 0.0, 1.0), Parcel("c", 0.0, 1.0)]
    _, found = played(sender(*parcels), receiver(len(wanted)))
    assert [message for message, _ in found] == wanted


def test_what_a_rank_has_sent_still_comes_after_its_end_and_then_its_peer_sees_that() -> None:
    def send_and_die(network: Network) -> None:
        sender(Parcel("last", 0.0, 4.0))(network)
        network.close(0)

    _, ended = played(send_and_die, receiver(2))
    assert ended == (CLOSED, 4.0)
    _, ended = played(lambda network: network.close(0), receiver(1))
    assert ended == (CLOSED, LATENCY)


def test_a_wait_ends_at_its_limit_and_closes_the_connections_of_who_waited() -> None:
    def watch(network: Network) -> tuple[bool, bool]:
        before = network.sees_closed(0, 1)
        network.time.sleep(3.0 + LATENCY)
        return before, network.sees_closed(0, 1)

    (before, after), ended = played(watch, receiver(1, timedelta(seconds=3)))
    assert ended == (TIMED_OUT, 3.0)
    assert (before, after) == (False, True)


def test_a_store_answers_all_ranks_and_goes_with_its_host() -> None:
    stores: list[Store] = []

    def host(network: Network) -> list[bytes]:
        stores.append(Store(network, host=0))
        store = stores[0]
        store.set("one", "1")
        found = [store.compare_set("one", "2", "3"), store.compare_set("one", "1", "3"), store.get("one")]
        assert not store.check(["one", "two"])
        network.time.sleep(5.0)
        network.close(0)
        return found

    def guest(network: Network) -> None:
        network.time.sleep(1.0)
        assert stores[0].get("one") == b"3"
        assert 1.0 < network.time.now < 1.0 + 2 * STORE_LATENCY
        network.time.sleep(10.0)
        stores[0].get("one")

    found, (ended, _) = played(host, guest)
    assert found == [b"1", b"3", b"3"]
    assert ended == "the store has gone with its host"
