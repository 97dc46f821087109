"""A peer that dies, or stops, in the middle of a message over gloo.

Gloo tells of a connection that closed by ending every wait for a message that has not begun to come. A wait for one
that has come in half it leaves alone, whatever else is done to the connection: the rank that had been sent 100 of 256
MiB said who had died only when its own timeout was over, 30 s later (an hour, where something might be compiling). So
the last thing that is sent, and waited for, is now always small.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import launch
from tiers import by_turns

from penstock.errors import PeerFailure
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.distributed.transfers import SEND_SLACK_SECONDS
from penstock.runtime.transport.distributed.transport import DistributedTransport
from penstock.runtime.transport.layout.tensor_places import DIRECT_BYTES

MANY = 128 * 2**20
LARGE = 64 * 2**20
VALUES: dict[str, Callable[[int], Any]] = {
    "one tensor": lambda _: torch.zeros(MANY, dtype=torch.uint8),
    "new every time": lambda number: torch.zeros(MANY + number, dtype=torch.uint8),
    "many small ones": lambda _: [torch.zeros(DIRECT_BYTES // 2, dtype=torch.uint8)] * (MANY // DIRECT_BYTES),
}


def sends_half(say: Callable[[Any], None], kind: str, how: int, timeout: float) -> None:
    transport = DistributedTransport(timeout=timeout)
    transport.open([Channel(0, 1, "F", 0, 1)])
    sending = threading.Event()

    def message(number: int) -> float:
        value = VALUES[kind](number) if transport.rank == 0 else None
        transport.exchange(None)
        begin = time.monotonic()
        if transport.rank == 0:
            sending.set()
            transport.send(0, number, value)
            transport.flush()
        else:
            transport.receive(0, number)
        return time.monotonic() - begin

    took = min([message(number) for number in range(3)][1:])
    dist.barrier()
    sending.clear()

    def end() -> None:
        sending.wait()
        time.sleep((0.4 if kind == "one tensor" else 0.75) * took)  # the others are packed first
        say(("fault", time.monotonic()))
        os.kill(os.getpid(), how)

    if transport.rank == 0:
        threading.Thread(target=end, daemon=True).start()
    try:
        for number in range(3, 1000):
            message(number)
    except PeerFailure as failure:
        say((failure.rank, time.monotonic()))
    os._exit(0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "how", "timeout", "most"),
    by_turns(VALUES, [(signal.SIGKILL, 40.0, 15.0), (signal.SIGSTOP, 12.0, 36.0)]),
)
def test_the_sender_is_named_in_time(kind: str, how: int, timeout: float, most: float) -> None:
    sender, receiver = launch(2, sends_half, kind, how, timeout, limit=120)
    ((_, fault),) = sender.said
    ((culprit, told),) = receiver.said
    assert culprit == 0
    assert told - fault < most


def takes_half(say: Callable[[Any], None], how: int, timeout: float) -> None:
    assert "torch._dynamo" in sys.modules  # as with every optimizer: it does not mean that anybody compiles
    transport = DistributedTransport(timeout=timeout)
    transport.open([Channel(0, 1, "F", 0, 1)])

    def message(number: int) -> float:
        transport.exchange(None)
        begin = time.monotonic()
        if transport.rank == 0:
            transport.send(0, number, torch.zeros(LARGE, dtype=torch.uint8))
            transport.flush()
        else:
            transport.receive(0, number)
        return time.monotonic() - begin

    took = min([message(number) for number in range(3)][1:])

    def end() -> None:
        say(("fault", time.monotonic()))
        os.kill(os.getpid(), how)

    try:
        for number in range(3, 1000):
            if transport.rank == 1 and number == 3:
                threading.Timer(0.5 * took, end).start()
            message(number)
    except PeerFailure as failure:
        say((failure.rank, time.monotonic()))
    os._exit(0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_receiver_is_named_too_though_only_by_the_timeout(how: int) -> None:
    """Nothing but gloo's own limit ends a send that has left in half: some seconds after ours, where it was an hour."""
    sender, receiver = launch(2, takes_half, how, 8.0, limit=120)
    ((_, fault),) = receiver.said
    ((culprit, told),) = sender.said
    assert culprit == 1
    assert told - fault < 8 + SEND_SLACK_SECONDS + 10  # which is for a machine that is busy
