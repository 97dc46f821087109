"""What only threads can do: no copy, nothing buffered at all, and waking everybody at once."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from transport_harness import run, values

from penstock.errors import PeerFailure, UsageError
from penstock.runtime.transport import Channel, ThreadTransport

CHANNELS = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)]


def opened(**options: Any) -> list[ThreadTransport]:
    group = ThreadTransport.group(2, **options)
    for transport in group:
        transport.open(CHANNELS)
    return group


@pytest.mark.parametrize("capacity", [0, 1, 2])
def test_a_send_waits_until_only_so_many_messages_are_without_a_posted_receive(capacity: int) -> None:
    first, second = opened(capacity=capacity)
    sent = []

    def send_all() -> None:
        for microbatch in range(5):
            first.send(0, microbatch, None)
            sent.append(microbatch)

    thread = threading.Thread(target=send_all)
    thread.start()
    for posted in range(6 - capacity):
        time.sleep(0.03)
        assert len(sent) == posted + capacity
        if posted + capacity < 5:
            second.post(0, posted)
    thread.join(5)
    for microbatch in range(5):
        second.receive(0, microbatch)


def both_send_first(transport: ThreadTransport) -> Any:
    """The mistake that buffering hides: neither posts its receive before it sends."""
    transport.open(CHANNELS)
    transport.send(transport.rank, 0, torch.ones(1))
    return transport.receive(1 - transport.rank, 0)


def test_at_capacity_0_a_program_that_needs_a_buffer_is_reported_as_a_deadlock() -> None:
    values(run("threads", both_send_first))
    errors = [outcome.error for outcome in run("threads-0", both_send_first, timeout=0.3)]
    assert all(isinstance(error, PeerFailure) and "deadlock" in str(error) for error in errors)


def aborted(transport: ThreadTransport) -> Any:
    transport.open(CHANNELS)
    if transport.rank == 1:
        time.sleep(0.1)
        transport.abort(PeerFailure(1, "ValueError: boom"))
        return None
    with pytest.raises(PeerFailure, match="boom"):  # and not at the timeout
        transport.receive(1, 0)
    assert transport.discard(1, 0) is not None
    transport.send_failure(0, 0, PeerFailure(0, "late"))  # nobody can be told any more; not an error
    return "told"


@pytest.mark.parametrize("kind", ["threads", "threads-0"])
def test_abort_wakes_every_waiter_at_once(kind: str) -> None:
    assert values(run(kind, aborted))[0] == "told"


def test_a_group_works_again_after_reset() -> None:
    first, second = opened(timeout=0.05)
    first.send(0, 0, "lost")
    with pytest.raises(PeerFailure, match=r"rank 1 failed .*1SEND_B0.* silent for 0.05 s"):
        first.receive(1, 0)
    with pytest.raises(PeerFailure, match="must be rebuilt"):
        second.receive(0, 0)
    for transport in (first, second):
        transport.reset()
        transport.open(CHANNELS)
    first.send(0, 0, "new")
    assert second.receive(0, 0) == "new"
    assert first.broken is None


def test_two_ranks_that_open_different_channels_are_told() -> None:
    first, second = ThreadTransport.group(2)
    first.open(CHANNELS)
    with pytest.raises(UsageError, match="other channels"):
        second.open(CHANNELS[:1])


@pytest.mark.parametrize(
    "options", [{"ranks": 0}, {"ranks": 2, "capacity": -1}, {"ranks": 2, "devices": ["cpu"]}], ids=str
)
def test_a_group_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ThreadTransport.group(**options)
