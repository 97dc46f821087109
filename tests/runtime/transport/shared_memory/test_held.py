"""What a process holds because of shared memory, and what processes that it forks off must not do with it."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from deadlines import SOON, TIMEOUT
from transport_harness import run, values

from penstock.errors import MessageError, PeerFailure, UsageError
from penstock.runtime.transport import Channel
from penstock.runtime.transport.layout.layout import Layout, flatten
from penstock.runtime.transport.shared_memory import connection as pair
from penstock.runtime.transport.shared_memory.blocks import allocate, map_memory
from penstock.runtime.transport.shared_memory.transport import SharedMemoryTransport

CHANNELS = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)]


def held() -> tuple[int, int, int]:
    """Descriptors, mapped blocks and threads of this process."""
    blocks = Path("/proc/self/maps").read_text().count("memfd:penstock")
    return len(os.listdir("/proc/self/fd")), blocks, len(os.listdir("/proc/self/task"))


def forks_a_child_that_lets_go(transport: Any) -> list[float] | None:
    transport.open(CHANNELS)
    if transport.rank == 0:
        for microbatch in range(6):
            transport.send(0, microbatch, torch.full((100,), float(microbatch)))
            transport.receive(1, microbatch)
        transport.exchange(None)
        return None
    kept = transport.receive(0, 0)
    child = os.fork()
    if child == 0:
        del kept  # its copy: the parent's is still there
        os._exit(0)
    os.waitpid(child, 0)
    transport.send(1, 0, None)
    for microbatch in range(1, 6):
        assert transport.receive(0, microbatch)[0] == microbatch
        transport.send(1, microbatch, None)
    transport.exchange(None)
    found: list[float] = kept.unique().tolist()
    return found


def test_a_fork_that_drops_its_copy_of_a_tensor_gives_no_block_back() -> None:
    assert values(run("shared", forks_a_child_that_lets_go))[1] == [0.0]


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


def drops_its_transports(transport: Any) -> list[tuple[int, int, int]]:
    transport.open(CHANNELS)
    transport.exchange(None)
    seen = []
    for _ in range(3):
        other = SharedMemoryTransport(timeout=TIMEOUT)
        other.open(CHANNELS)
        if other.rank == 0:
            other.send(0, 0, torch.ones(5))
        else:
            other.receive(0, 0)
        other.exchange(None)
        del other
        gc.collect()
        transport.exchange(None)
        time.sleep(0.2)  # its watch ends
        seen.append(held())
    return seen


def test_a_transport_that_nobody_closed_holds_nothing_when_it_is_gone() -> None:
    for seen in values(run("shared", drops_its_transports)):
        assert seen[2] == seen[0], seen


def test_a_block_costs_no_descriptor() -> None:
    before, _, _ = held()
    views = []
    for _ in range(5):
        descriptor = allocate(5000)
        views.append(map_memory(descriptor))
        os.close(descriptor)
    assert held()[:2] == (before, 5)
    assert views[0].nbytes == 5000
    views.clear()
    assert held()[:2] == (before, 0)


def test_memory_that_cannot_be_mapped_is_an_error_that_says_why() -> None:
    with open("/dev/null") as nothing, pytest.raises(OSError, match="Invalid argument"):
        map_memory(nothing.fileno())


def test_a_receiver_that_cannot_map_a_block_says_so() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        receiver = pair.Connection(3, ours, lambda _: None)
        theirs.send(pair.HEAD.pack(pair.BLOCK, 0, 0, 0, 0, 0, 0, 0))  # the kernel drops what finds no descriptor free
        with pytest.raises(MessageError, match="that rank 3 sent cannot be mapped: Too many open files; raise"):
            receiver.read(False)


@pytest.mark.filterwarnings("ignore")  # torch's, of what is in beta or leaves
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda dense: dense.to_sparse(), "torch.sparse_coo"),
        (lambda dense: dense.to_sparse_csr(), "torch.sparse_csr"),
        (lambda dense: dense.to_mkldnn(), "torch._mkldnn"),
        (lambda dense: dense.to("meta"), "meta"),
        (lambda dense: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8), "quantised"),
        (lambda dense: torch.nested.nested_tensor([dense, dense]), "nested"),
        (lambda dense: torch.nested.nested_tensor([dense, dense], layout=torch.jagged), "nested"),
    ],
)
def test_what_is_not_dense_is_refused_by_name_also_after_dense_ones(make: Any, kind: str) -> None:
    dense = torch.ones(4, 3)
    odd = make(dense)
    if kind != "nested":  # it has no shape to compare
        assert Layout.of(flatten(dense), False).fits(odd) is None
    with pytest.raises(UsageError, match=f"a {kind} tensor cannot cross"):
        Layout.of(flatten(odd), False)
