"""The ends of a channel in shared memory: who waits for whom, and what both remember."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transport_harness import run, values

from penstock.errors import MessageError, PeerFailure
from penstock.runtime.transport import Channel
from penstock.runtime.transport.shared_memory import connection as pair

FORTH, BACK, SKIP = 0, 1, 2


PAIR = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0), Channel(0, 3, "F", 0, 1)]


SMALL = 1 << 16


def mapped() -> int:
    """How many blocks this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:penstock")


def is_in_place(transport: Any) -> Any:
    """Where a received tensor lies, and that the block comes back when it dies, and not before."""
    transport.open(PAIR)
    if transport.rank == 0:
        for microbatch in range(6):
            transport.send(FORTH, microbatch, torch.ones(SMALL))
            transport.receive(BACK, microbatch)
        return mapped()
    maps = []
    for microbatch in range(6):
        came = transport.receive(FORTH, microbatch)
        maps.append(came.data_ptr())
        del came
        transport.send(BACK, microbatch, None)
    inside = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line
    ]
    spans = [range(int(low, 16), int(high, 16)) for low, high in inside]
    assert all(any(place in span for span in spans) for place in maps)
    return len(set(maps))


def test_the_receiver_computes_on_the_block_itself_and_one_block_is_enough_for_one_at_a_time() -> None:
    sender, places = values(run("shared", is_in_place))
    assert places == 1
    assert sender == 3  # the block, and on each side the words that count posts


def runs_ahead(transport: Any) -> Any:
    """How many messages a sender gets rid of while its receiver posts nothing, then one receive."""
    transport.open(PAIR)
    if transport.rank == 0:
        sent: list[float] = []

        def send() -> None:
            for microbatch in range(20):
                transport.send(FORTH, microbatch, torch.ones(10))
                sent.append(time.monotonic())

        thread = threading.Thread(target=send)
        thread.start()
        time.sleep(0.3)
        first = len(sent)
        transport._connections[1].write(pair.HEAD.pack(pair.WAKE, *[0] * 7))  # any packet that means nothing
        thread.join(10)
        assert len(sent) == 20
        return first
    time.sleep(1)
    for microbatch in range(20):
        transport.post(FORTH, microbatch)
    for microbatch in range(20):
        transport.receive(FORTH, microbatch)
    return None


def test_a_sender_waits_when_it_is_too_far_ahead_of_what_is_posted() -> None:
    from penstock.runtime.transport.shared_memory.transport import AHEAD

    assert values(run("shared", runs_ahead))[0] == AHEAD


def holds_everything(transport: Any, count: int) -> bool:
    """A receiver that lets nothing go must not hold up the sender: everything that was posted may come."""
    transport.open(PAIR)
    for step in range(2):
        if transport.rank == 0:
            for microbatch in range(count):
                transport.send(FORTH, microbatch, torch.full((1000,), float(microbatch + step)))
            assert transport.receive(BACK, 0) == "all held"
        else:
            for microbatch in range(count):
                transport.post(FORTH, microbatch)
            held = [transport.receive(FORTH, microbatch) for microbatch in range(count)]
            assert [int(tensor[-1]) for tensor in held] == [microbatch + step for microbatch in range(count)]
            transport.send(BACK, 0, "all held")
        transport.exchange(None)
    return True


def test_a_receiver_that_holds_everything_does_not_hold_up_the_sender() -> None:
    assert values(run("shared", holds_everything, count=200)) == [True, True]


def talks_large(transport: Any) -> bool:
    """Plain values and failures far larger than a packet."""
    transport.open(PAIR)
    text = "x" * 1_000_000
    if transport.rank == 0:
        transport.send(FORTH, 0, {"text": text, "tensor": torch.ones(3)})
        transport.send_failure(FORTH, 1, PeerFailure(0, "boom", original_traceback=text))
    else:
        assert transport.receive(FORTH, 0)["text"] == text
        with pytest.raises(PeerFailure, match="boom") as caught:
            transport.receive(FORTH, 1)
        assert caught.value.original_traceback is not None
        assert len(caught.value.original_traceback) < 20_000  # a failure is never too long to be told
        assert "characters left out" in caught.value.original_traceback
    transport.exchange(None)
    return True


def test_layouts_and_failures_of_any_length_pass() -> None:
    assert values(run("shared", talks_large)) == [True, True]


def never_the_same(transport: Any) -> bool:
    """More layouts than either end remembers."""
    transport.open(PAIR)
    pair.LAYOUTS = 10
    for microbatch in range(35):
        value = {f"key {microbatch % 20}": torch.full((2,), float(microbatch))}
        if transport.rank == 0:
            transport.send(FORTH, microbatch, value)
        else:
            (came,) = transport.receive(FORTH, microbatch).values()
            assert came[0] == microbatch
    transport.exchange(None)
    return True


def test_layouts_that_never_repeat_are_forgotten_on_both_ends() -> None:
    assert values(run("shared", never_the_same)) == [True, True]


def test_a_receiver_that_cannot_map_a_block_says_so() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        receiver = pair.Connection(3, ours, lambda _: None)
        theirs.send(pair.HEAD.pack(pair.BLOCK, 0, 0, 0, 0, 0, 0, 0))  # the kernel drops what finds no descriptor free
        with pytest.raises(MessageError, match="that rank 3 sent cannot be mapped: Too many open files; raise"):
            receiver.read(False)
