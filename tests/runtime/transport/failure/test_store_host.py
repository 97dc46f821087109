"""Who is lost or silent with the group's store."""

from __future__ import annotations

import pytest

from penstock.errors import PeerFailure
from penstock.runtime.transport.failure.store_host import StoreHost


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
