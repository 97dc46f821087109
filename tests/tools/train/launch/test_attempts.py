"""Ranks of one attempt meet under a prefix of their own, though the store remembers dead ones."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore

from penstock.errors import PeerFailure, RunError
from penstock.tools.train.launch import attempts
from penstock.tools.train.launch.attempts import let_go, new_prefix, reach_store, stand_by

LIMIT = timedelta(seconds=20)


def test_each_attempt_gets_one_prefix_for_all_ranks_and_another_than_before() -> None:
    store = HashStore()
    store.set("penstock/ask/2", "the word of a rank that died while it waited")
    found = []
    with ThreadPoolExecutor(3) as pool:
        for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
            answers = [pool.submit(new_prefix, store, rank, 3, LIMIT) for rank in order]
            (prefix,) = {answer.result(30) for answer in answers}
            found.append(prefix)
    assert len(set(found)) == 3


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(RunError, match=r"ranks \[1, 2\] have not come within 0.1 s"):
        new_prefix(HashStore(), 0, 3, timedelta(seconds=0.1))


def test_all_ranks_name_the_one_that_does_not_come() -> None:
    """Once, those that had the prefix went on, and waited for the missing one in a call that names nobody."""
    store, limit = HashStore(), timedelta(seconds=1)
    with ThreadPoolExecutor(2) as pool:
        for answer in [pool.submit(new_prefix, store, rank, 3, limit) for rank in (0, 1)]:
            with pytest.raises(RunError, match=r"ranks \[2\] have not come within 1 s"):
                answer.result(30)
    with pytest.raises(RunError, match=r"rank 0 has not come within 0\.1 s"):
        new_prefix(HashStore(), 1, 3, timedelta(seconds=0.1))


def test_a_store_that_is_gone_names_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def set(self, *_: Any) -> None:
            raise DistNetworkError("Failed to recv, got 0 bytes")

        check = set

    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(PeerFailure, match=r"rank 0 failed: died or left \(the store that it hosts is gone\)"):
        new_prefix(Gone(), 1, 3, LIMIT)
    let_go(Gone(), [2])  # whoever stood by finds that out


def test_a_store_that_cannot_be_reached_is_named_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        port = str(taken.getsockname()[1])
        place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RunError, match=rf"the store of the run at 127\.0\.0\.1:{port} cannot be reached"):
            reach_store(timedelta(seconds=1))


def test_processes_that_stand_by_go_when_the_run_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is lost while it stands by is not waited for without end."""
    monkeypatch.setattr(attempts, "STAND_BY_BEAT", 0.01)
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(stand_by, store, rank) for rank in (2, 3)]
        with pytest.raises(TimeoutError):
            waiting[0].result(0.2)
        let_go(store, [2, 3])
        assert [each.result(20) for each in waiting] == [0, 0]
    monkeypatch.setattr(attempts, "LET_GO", timedelta(seconds=0.1))
    let_go(store, [4])


def test_a_process_that_stands_by_does_not_wait_for_a_store_that_is_gone() -> None:
    class Gone:
        def check(self, names: list[str]) -> bool:
            raise DistNetworkError("connection reset")

    with pytest.raises(RunError, match="rank 2 stood by, and the store of the run is gone"):
        stand_by(Gone(), 2)
