"""Two ranks of four died at once. Of the two that were left, one named the other, which had only left before it.

The rank that hosts the store waits until the others have read the verdict, but not for ever: of two dead ranks, only
one is in the verdict, and the other never reads it. On a loaded machine a living rank was later than these three
seconds. It found the store gone, and blamed its host, though it had read itself in the store who was lost.

And a rank that was silent for the timeout, busy in its own code, may come back in that very moment: it was not waited
for, because the verdict was of it, and it blamed the host as well (seed 374 of the rehearsals).
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore

from penstock.errors import PeerFailure
from penstock.runtime.transport.failure import watch as module
from penstock.runtime.transport.failure.blame import State
from penstock.runtime.transport.failure.notes import Alarm, Bulletin
from penstock.runtime.transport.failure.watch import Watch
from penstock.schedule import Costs, build
from penstock.tools.rehearsal.rehearse import rehearse

LOST = PeerFailure(2, "died or left (its connection closed) while rank 1 waited")
PREFIX = "test"


def asks(store: HashStore, rank: int) -> Bulletin:
    return Bulletin(lambda method, *arguments: getattr(store, method)(*arguments), PREFIX, rank, 4)


class Leaving:
    """A store that is gone once somebody has answered the alarm in it: its host has judged, and left."""

    def __init__(self, store: HashStore, error: Exception) -> None:
        self._store, self._error = store, error

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        if self._store.check([f"{PREFIX}/state/0/1"]):
            raise self._error
        return getattr(self._store, name)


def test_a_store_that_goes_after_an_alarm_names_whom_the_alarm_named() -> None:
    store = HashStore()
    asks(store, 0).raise_alarm(Alarm(0, None, LOST))
    left = Leaving(store, DistNetworkError("Connection reset by peer"))
    watch = Watch(left, 0, PREFIX, 1, 4, 5.0, lambda peer: None)
    found = watch.propose(
        PeerFailure(0, "died or left (its connection closed)")
    )  # that host, as the main thread saw it
    watch.close()
    assert (found.rank, found.cause) == (LOST.rank, LOST.cause)


def test_the_host_of_the_store_waits_for_those_that_have_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for no longer than before for one that has not: it is as dead as the one that is named."""
    monkeypatch.setattr(module, "STORE_SECONDS", 0.2)
    store = HashStore()
    others = {rank: asks(store, rank) for rank in (1, 3)}
    others[1].pronounce(LOST)
    others[1].tell_state(State(None, "busy", None))
    late = threading.Timer(1.5, others[1].tell_read)
    watch = Watch(store, 0, PREFIX, 0, 4, 5.0, lambda peer: None)
    late.start()
    assert watch.propose(LOST).rank == 2
    watch.close()
    assert not late.is_alive()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_host_of_the_store_waits_for_the_rank_that_is_named_if_that_is_alive(seed: int) -> None:
    found = rehearse(
        build("1f1b", 2, 3), Costs(), faults=["stall 1 at 3.2 for 40"], seed=seed, timeout=10.0, store_host=0
    )
    assert [notice.named for notice in found.notices] == [1, 1]
