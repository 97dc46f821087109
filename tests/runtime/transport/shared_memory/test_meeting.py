"""How ranks on one host find each other, and nobody else."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch
from transport_harness import run, values

from penstock.runtime.transport import Channel
from penstock.runtime.transport.own_socket import path_of
from penstock.runtime.transport.shared_memory import meeting
from penstock.runtime.transport.shared_memory.transport import SharedMemoryTransport

FORTH, BACK, SKIP = 0, 1, 2


PAIR = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0), Channel(0, 3, "F", 0, 1)]


def minds_its_own(transport: Any, number: int) -> bool:
    transport.open(PAIR)
    for microbatch in range(200):
        if transport.rank == 0:
            transport.send(FORTH, microbatch, torch.full((5000,), float(number)))
        else:
            assert transport.receive(FORTH, microbatch).eq(float(number)).all()
    transport.exchange(None)
    return True


def test_two_runs_at_once_do_not_meet() -> None:
    said: dict[int, list[Any]] = {}
    runs = [
        threading.Thread(
            target=lambda number=number: said.update({number: values(run("shared", minds_its_own, number=number))})
        )
        for number in range(2)
    ]
    for each in runs:
        each.start()
    for each in runs:
        each.join()
    assert said == {0: [True, True], 1: [True, True]}


def knocks(transport: Any) -> Any:
    """Somebody who cannot make the code knocks before the true peer does, and is turned away."""
    if transport.rank == 1:
        address = transport._meeting.address_of(0).socket
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(path_of(address))
            stranger.send(meeting.HELLO.pack(1, b"0" * 32))
            stranger.send(b"0" * 32)  # in the place of the code
            transport.open(PAIR)
            transport.send(BACK, 0, "from the true one")
            stranger.settimeout(5)
            try:
                stranger.recv(100)
                turned_away = stranger.recv(10) == b""
            except ConnectionResetError:
                turned_away = True
        transport.exchange(None)
        return turned_away
    transport.open(PAIR)
    came = transport.receive(BACK, 0)
    transport.exchange(None)
    return came


def test_who_cannot_make_the_code_is_turned_away() -> None:
    assert values(run("shared", knocks)) == ["from the true one", True]


def far_apart(transport: Any, how: str) -> Any:
    """One rank seems to be elsewhere, or cannot be reached: both take torch.distributed, and say so."""
    if how == "host":
        transport.close()
        if transport.rank == 1:
            meeting.this_host = lambda: "another host"
        transport = SharedMemoryTransport(timeout=10)
    elif transport.rank == 0:
        transport._meeting._listener.close()  # whoever knocks is refused
        transport._meeting._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        transport._meeting._listener.bind(b"")
        transport._meeting._listener.listen()
        transport._meeting._listener.settimeout(0.02)
    transport.open(PAIR)
    if transport.rank == 0:
        transport.send(FORTH, 0, torch.ones(3))
    else:
        assert torch.equal(transport.receive(FORTH, 0), torch.ones(3))
    transport.flush()
    transport.exchange(None)
    said = transport.describe_link(0, 1)
    transport.close()
    return said


@pytest.mark.parametrize(
    ("how", "reason"), [("host", "on different hosts"), ("refused", "rank 1 cannot connect to rank 0")]
)
def test_ranks_that_are_not_near_use_torch_distributed(how: str, reason: str) -> None:
    for wire in values(run("shared", far_apart, how=how)):
        assert wire.startswith("torch.distributed (gloo)")
        assert reason in wire
