"""Ranks with a reason to be silent, whose mark excuses only while it is renewed; and who is silent with the store."""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.errors import PeerFailure
from penstock.runtime.transport.failure import notes
from penstock.runtime.transport.failure.notes import Bulletin
from penstock.runtime.transport.failure.silence import Marks, StoreHost


def test_a_mark_that_is_written_again_excuses_no_silence() -> None:
    store: dict[str, Any] = {}

    def ask(method: str, *arguments: Any) -> Any:
        if method == "set":
            store[arguments[0]] = arguments[1].encode()
            return None
        return store[arguments[0]] if method == "get" else arguments[0][0] in store

    boards = [Bulletin(ask, "penstock/0", rank, 2) for rank in (0, 1)]
    stopped, other = (Marks("compiling", board, fresh=0.05) for board in boards)
    assert not other.anybody()
    recorded = []
    for _ in range(3):
        stopped.tell(True)
        recorded.append(dict(store))
        boards[1].has_changed(0)
        assert other.anybody()
    time.sleep(0.1)
    for old in recorded:
        store.update(old)
        assert not other.anybody()
    store["penstock/0/compiling/0"] = b"4"
    with pytest.raises(notes.Tampered):
        other.anybody()


def test_a_store_that_is_gone_or_silent_names_the_rank_that_has_it() -> None:
    gone, silent = StoreHost(2, rank=0).gone(), StoreHost(2, rank=0).silent()
    assert gone is not None
    assert silent is not None
    assert (gone.rank, silent.rank) == (2, 2)
    assert "the store that it hosts is gone" in gone.cause
    assert "has not answered for 3 s" in silent.cause


@pytest.mark.parametrize("host", [None, 1])
def test_nobody_is_named_for_a_store_of_its_own_or_of_an_agent(host: int | None) -> None:
    store = StoreHost(host, rank=1)
    assert store.is_here == (host == 1)
    assert store.gone() is None
    assert store.silent() is None


def test_a_store_in_another_group_is_lost_as_that_group_says() -> None:
    store = StoreHost(None, rank=1)
    store.far = PeerFailure(0, "left", replica=3)
    gone = store.gone()
    assert gone is not None
    assert str(gone) == str(store.far)
    assert gone is not store.far  # whoever raises it may change it
