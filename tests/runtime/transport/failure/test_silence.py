"""Ranks with a reason to be silent: a mark excuses only while it is renewed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.runtime.transport.failure import notes
from penstock.runtime.transport.failure.bulletin import Bulletin
from penstock.runtime.transport.failure.silence import Marks


def test_a_mark_that_is_written_again_excuses_no_silence() -> None:
    store: dict[str, Any] = {}

    def ask(method: str, *arguments: Any) -> Any:
        if method == "set":
            store[arguments[0]] = arguments[1].encode()
            return None
        return store[arguments[0]] if method == "get" else arguments[0][0] in store

    boards = [Bulletin(ask, "penstock/0", rank, 2) for rank in (0, 1)]
    stopped, other = (Marks("compiling", ask, board, rank, 2, fresh=0.05) for rank, board in enumerate(boards))
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
