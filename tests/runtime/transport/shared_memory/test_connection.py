"""The connection of two ranks on one host: its socket, its words, and what a process holds because of it."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from deadlines import SOON, TIMEOUT
from transport_harness import run, values

from penstock.errors import PeerFailure
from penstock.runtime.transport import Channel
from penstock.runtime.transport.shared_memory import blocks


def fills_the_socket(transport: Any, count: int) -> bool:
    """More packets than a socket takes, while the receiver waits for a third rank, which waits for the sender."""
    transport.open([Channel(0, 1, "F", 0, 1), Channel(0, 2, "F", 0, 2), Channel(2, 1, "F", 2, 1)])
    if transport.rank == 0:
        for microbatch in range(count):
            transport.send(0, microbatch, None)
        transport.send(1, 0, "go")
    elif transport.rank == 2:
        transport.send(2, 0, transport.receive(1, 0))
    else:
        for microbatch in range(count):
            transport.post(0, microbatch)
        assert transport.receive(2, 0) == "go"
        for microbatch in range(count):
            assert transport.receive(0, microbatch) is None
    transport.exchange(None)
    return True


def test_a_full_socket_does_not_make_a_sender_wait_for_more_than_posts() -> None:
    assert values(run("shared", fills_the_socket, ranks=3, count=3000)) == [True, True, True]


def test_words_are_stored_whole() -> None:
    """The two sides meet in aligned words of eight bytes, which memoryview stores in one piece."""
    memory = blocks.map_memory(descriptor := blocks.allocate(64))
    os.close(descriptor)
    words = memory.cast("Q")
    words[0] = 0x0102_0304_0506_0708
    assert ctypes.c_uint64.from_buffer(memory).value == 0x0102_0304_0506_0708
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 64 == 0


CHANNELS = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)]


def dies_with_a_child_left(transport: Any, notes: str) -> float:
    transport.open(CHANNELS)
    transport.exchange(None)
    if transport.rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(2 * SOON)  # as a worker that loads data
            os._exit(0)
        Path(notes).write_text(f"{child} {time.monotonic()}")
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerFailure, match="rank 1 failed"):
        transport.receive(1, 0)
    child, died = Path(notes).read_text().split()
    told = time.monotonic() - float(died)
    os.kill(int(child), signal.SIGKILL)
    return told


def test_a_death_is_seen_at_once_also_where_the_dead_one_has_left_children(tmp_path: Path) -> None:
    outcomes = run("shared", dies_with_a_child_left, timeout=TIMEOUT, notes=str(tmp_path / "notes"))
    assert outcomes[0].get() < SOON  # neither at the timeout nor when the child ends
