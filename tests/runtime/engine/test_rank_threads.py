"""The threads of ranks: each runs its own jobs in order, hands errors over, and ends when it is told to."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
from deadlines import SOON

from penstock.runtime.engine.rank_threads import Workers


def test_each_rank_has_a_thread_of_its_own_which_is_a_daemon() -> None:
    workers = Workers([0, 2])
    try:
        found = [workers.submit(rank, threading.current_thread).result(SOON) for rank in (0, 2)]
        assert [each.name for each in found] == ["penstock-rank-0", "penstock-rank-2"]
        assert all(each.daemon for each in found)
        assert [workers.ranks[each.ident] for each in found] == [0, 2]
    finally:
        workers.stop()
        workers.join(SOON)
    assert not any(each.is_alive() for each in found)


def test_an_error_is_the_jobs_and_the_thread_goes_on() -> None:
    workers = Workers([0])

    def fails() -> Any:
        raise KeyboardInterrupt

    failed, after = workers.submit(0, fails), workers.submit(0, lambda: [])
    with pytest.raises(KeyboardInterrupt):
        failed.result(SOON)
    assert after.result(SOON) == []
    workers.stop()
    workers.join(SOON)


def test_an_idle_thread_holds_nothing_of_a_job() -> None:
    class Large:
        pass

    workers, large = Workers([0]), Large()
    seen = weakref.ref(large)
    workers.submit(0, lambda held=large: []).result(SOON)
    workers.submit(0, lambda: []).result(SOON)  # the thread is past the first one
    del large
    gc.collect()
    assert seen() is None
    workers.stop()
    workers.join(SOON)
