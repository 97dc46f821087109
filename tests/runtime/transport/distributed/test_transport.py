"""What only processes can suffer: death, silence, messages that look different, and what gloo makes of it."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deadlines import TIMEOUT
from transport_harness import run, values
from transports import ON_PROCESSES

from penstock.errors import UsageError
from penstock.runtime.transport import Channel
from penstock.runtime.transport.layout.tensor_places import DIRECT_BYTES

PAIR = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)]


def in_a_subgroup(transport: Any) -> Any:
    """Pipelines of the ranks {2, 0} and {1}: ranks of a transport are ranks of its group."""
    group = dist.new_group([0, 2])
    if transport.rank == 1:
        return None
    two = type(transport)(group, timeout=TIMEOUT)
    two.open(PAIR)
    if two.rank == 0:
        two.send(0, 0, f"from world rank {transport.rank}")
        came = two.receive(1, 0)
    else:
        came = two.receive(0, 0)
        two.send(1, 0, f"from world rank {transport.rank}")
    two.flush()
    two.exchange(None)
    two.close()
    return two.rank, came


@pytest.mark.parametrize("kind", ON_PROCESSES)
def test_ranks_are_those_of_the_process_group(kind: str) -> None:
    said = values(run(kind, in_a_subgroup, ranks=3))
    assert said == [(0, "from world rank 2"), None, (1, "from world rank 0")]


def refuses(transport: Any) -> list[str]:
    transport.open(PAIR)
    said = []
    if transport.rank == 0:
        wrong = [lambda: None, torch.ones(2).to_sparse(), torch.empty(2, device="meta")]
        for value in wrong:
            with pytest.raises(UsageError) as caught:
                transport.send(0, 0, value)
            said.append(str(caught.value))
        transport.send(0, 0, "after all")
        with pytest.raises(UsageError, match="cannot receive on channel 0"):
            transport.receive(0, 0)
    else:
        said.append(transport.receive(0, 0))
    transport.exchange(None)
    return said


@pytest.mark.parametrize("kind", ON_PROCESSES)
def test_a_value_that_cannot_cross_is_refused_and_the_link_goes_on(kind: str) -> None:
    first, second = values(run(kind, refuses))
    assert len(first) == 3
    assert all("cannot cross" in text for text in first)
    assert second == ["after all"]


def leaves_nothing(transport: Any) -> Any:
    def held() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    transport.close()
    before = held()
    for _ in range(3):
        other = type(transport)(timeout=TIMEOUT)
        other.open(PAIR)
        if other.rank == 0:
            other.send(0, 0, torch.ones(DIRECT_BYTES))
        else:
            other.receive(0, 0)
        other.flush()
        other.exchange(None)
        other.close()
        other.close()
    return before, held()


@pytest.mark.parametrize("kind", ON_PROCESSES)
def test_close_leaves_no_thread_and_no_file_behind(kind: str) -> None:
    for before, after in values(run(kind, leaves_nothing)):
        assert before == after


def test_a_transport_needs_a_process_group() -> None:
    from penstock.runtime.transport.distributed.transport import DistributedTransport

    with pytest.raises(UsageError, match="not initialised"):
        DistributedTransport()
