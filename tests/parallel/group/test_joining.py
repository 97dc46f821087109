"""While torch connects processes, the one that is lost is named by all others."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import DistNetworkError, TCPStore

from penstock.errors import PeerFailure, RunError, UsageError
from penstock.parallel.group import joining as module
from penstock.parallel.group.joining import joining


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COUNT_SECONDS", 0.02)
    monkeypatch.setattr(module, "QUIET_SECONDS", 1.0)


def fails(port: int, rank: int, ranks: int, place: str) -> str:
    """One rank, whose connection is refused; what it says."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    with pytest.raises(RunError) as caught, joining(store, rank, ranks, place):
        raise RuntimeError("[pair.cc:553] Connection refused. This is typically caused by a worker.\nframe 1")
    return str(caught.value)


def test_a_rank_that_never_came_is_named_by_all_others() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(2) as pool:
        said: list[Future[str]] = [pool.submit(fails, store.port, rank, 3, "a") for rank in (0, 2)]
        for rank, each in zip((0, 2), said, strict=True):
            assert each.result() == f"rank 1 failed: died or left while rank {rank} waited for all ranks to connect"


def test_several_are_all_named_and_one_that_has_said_so_and_left_is_not() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert "rank 1 failed: died or left (as ranks 2 and 3)" in fails(store.port, 0, 4, "a")
    assert "rank 2 failed: died or left (as rank 3)" in fails(store.port, 1, 4, "a")  # rank 0 has failed, and said so


def test_an_error_that_is_no_loss_is_told_in_one_line() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(2) as pool:
        said = [pool.submit(fails, store.port, rank, 2, "a") for rank in (0, 1)]
        assert said[0].result() == "rank 0 could not connect to the others: [pair.cc:553] Connection refused"


def test_what_is_no_failure_of_a_connection_passes_through() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(UsageError), joining(store, 0, 2, "a"):
        raise UsageError("pass something else")
    with joining(store, 0, 2, "b"):
        pass


class Gone:
    def clone(self) -> Gone:
        return self

    def set(self, *_: Any) -> None:
        raise DistNetworkError("Connection reset by peer")

    check = set


def test_a_store_that_is_gone_names_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    lost = pytest.raises(PeerFailure, match=r"rank 0 failed: died or left \(the store that it hosts is gone\)")
    with lost, joining(Gone(), 1, 2, "a"):
        pass
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    gone = pytest.raises(RunError, match=r"the store of the run is gone \(Connection reset by peer\)")
    with gone, joining(Gone(), 1, 2, "a"):
        pass
