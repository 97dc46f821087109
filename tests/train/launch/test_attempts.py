"""Ranks of one attempt meet under a prefix of their own, though the store remembers dead ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from penstock.errors import RunError
from penstock.train.launch.attempts import new_prefix

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
