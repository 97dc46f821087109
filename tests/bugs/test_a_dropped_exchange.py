"""A pipeline that is dropped while an exchange is under way leaves the connections to those that follow."""

from __future__ import annotations

import gc

import pytest
import torch.distributed as dist
from processes import on_processes

from penstock.runtime.transport.distributed.transport import DistributedTransport


def dropped_and_made_again() -> list[int]:
    """Each rank drops an exchange, rank 0 before rank 1's report comes; then all exchange anew."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    transport = DistributedTransport(timeout=5.0)
    transport.open([])
    if rank == 1:
        store.wait(["dropped"])
    transport.post_exchange(rank)
    del transport
    gc.collect()
    store.set("dropped", "")
    store.wait(["dropped"])
    again = DistributedTransport(timeout=5.0)
    again.open([])
    found: list[int] = again.exchange(rank)
    again.close()
    return found


@pytest.mark.slow
def test_an_exchange_that_was_dropped_blocks_no_later_one() -> None:
    """`for result in pipe.train_steps(...): break`, then another pipeline on the same group: both ranks waited for each
    other until the timeout, also on CPUs. Gloo reads no further where the memory of a receive that it has is gone."""
    assert on_processes(2, dropped_and_made_again) == [[0, 1], [0, 1]]
