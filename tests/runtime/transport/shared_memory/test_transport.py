"""What only shared memory can get wrong: a block written while it is read, memory that runs out, things left behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from deadlines import TIMEOUT
from tiers import mostly_slow
from transport_harness import run, values

from penstock.errors import PeerFailure, UsageError
from penstock.runtime.transport import Channel
from penstock.runtime.transport.shared_memory import meeting
from penstock.runtime.transport.shared_memory.transport import SharedMemoryTransport

FORTH, BACK, SKIP = 0, 1, 2


PAIR = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0), Channel(0, 3, "F", 0, 1)]


SMALL = 1 << 16


def content(number: int, size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int64) * 31 + number


def mapped() -> int:
    """How many blocks this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:penstock")


def outlives(transport: Any) -> Any:
    """What came through shared memory is good after the transport, the peer and its process have gone."""
    transport.open(PAIR)
    if transport.rank == 0:
        transport.send(FORTH, 0, content(5, 100_000))
        transport.exchange(None)
        return mapped()
    came = transport.receive(FORTH, 0)
    transport.exchange(None)
    transport.close()
    time.sleep(0.5)
    assert torch.equal(came, content(5, 100_000))
    del came
    gc.collect()
    return mapped()


def test_a_value_outlives_its_transport_and_nothing_outlives_the_value() -> None:
    assert values(run("shared", outlives))[1] == 0


def listening() -> set[int]:
    """The inodes of all Unix sockets."""
    return {int(line.split()[6]) for line in Path("/proc/net/unix").read_text().splitlines()[1:]}


def leftovers() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "penstock" in name}


def leaves_in_the_middle(transport: Any, how: str, folder: str) -> Any:
    """One step, then an end of some kind. What it listened on is written down, to be looked for afterwards."""
    transport.open(PAIR)
    inode = os.fstat(transport._meeting._listener.fileno()).st_ino
    assert inode in listening()
    Path(folder, str(transport.rank)).write_text(str(inode))
    if transport.rank == 0:
        transport.send(FORTH, 0, torch.ones(SMALL))
        transport.receive(BACK, 0)
    else:
        transport.send(BACK, 0, transport.receive(FORTH, 0))
    transport.exchange(None)
    if how == "kill all" or (how == "kill one" and transport.rank == 0):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise RuntimeError("on purpose")
    if how == "interrupt" and transport.rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):  # and not PeerFailure at the timeout
            transport.receive(FORTH, 0)
        return True
    if how == "interrupt":
        time.sleep(1)
    elif how == "kill one":
        with pytest.raises(PeerFailure, match="rank 0 failed"):
            transport.receive(FORTH, 0)
    return True


@pytest.mark.parametrize("how", mostly_slow(["end", "raise", "interrupt", "kill one", "kill all"], "end", "kill one"))
def test_nothing_is_left_behind_however_it_ends(how: str, tmp_path: Path) -> None:
    outcomes = run("shared", leaves_in_the_middle, how=how, folder=str(tmp_path))
    if how in ("end", "interrupt"):
        assert values(outcomes) == [True, True]
    if how == "kill one":
        assert outcomes[1].get() is True
    inodes = {int(path.read_text()) for path in tmp_path.iterdir()}
    assert len(inodes) == 2
    assert not inodes & listening()
    found = leftovers()
    if found:  # another test is just making a socket
        time.sleep(1)
    assert not found & leftovers()
    assert mapped() == 0


def two_hosts(transport: Any) -> Any:
    """Ranks 0 and 1 on one host, 2 seems to be on another: each link takes its own way, in one program."""
    transport.close()
    if transport.rank == 2:
        meeting.this_host = lambda: "another host"
    transport = SharedMemoryTransport(timeout=10)
    line = [Channel(0, 1, "F", 0, 1), Channel(1, 2, "F", 1, 2), Channel(2, 1, "B", 2, 1), Channel(1, 0, "B", 1, 0)]
    transport.open(line)
    for step in range(3):
        for microbatch in range(5):
            value = torch.full((300,), float(step * 10 + microbatch))
            if transport.rank == 0:
                transport.post(3, microbatch)
                transport.send(0, microbatch, value)
                assert torch.equal(transport.receive(3, microbatch), value)
            elif transport.rank == 1:
                transport.send(1, microbatch, transport.receive(0, microbatch))
                transport.send(3, microbatch, transport.receive(2, microbatch))
            else:
                transport.send(2, microbatch, transport.receive(1, microbatch))
        transport.flush()
        assert transport.exchange(transport.rank) == [0, 1, 2]
    said = [transport.describe_link(0, 1), transport.describe_link(1, 2)]
    transport.close()
    return said


def test_each_link_takes_its_own_way() -> None:
    for near, far in values(run("shared", two_hosts, ranks=3)):
        assert near == "shared memory"
        assert far == "torch.distributed (gloo), on different hosts"


def insists(transport: Any) -> str:
    transport.close()
    if transport.rank == 1:
        meeting.this_host = lambda: "another host"
    strict = SharedMemoryTransport(timeout=10, strict=True)
    with pytest.raises(UsageError) as caught:
        strict.open(PAIR)
    strict.close()
    return str(caught.value)


def test_who_insists_on_shared_memory_is_told_where_there_is_none() -> None:
    for said in values(run("shared", insists)):
        assert "on different hosts" in said
        assert "leave transport= out" in said


CHANNELS = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)]


def held() -> tuple[int, int, int]:
    """Descriptors, mapped blocks and threads of this process."""
    blocks = Path("/proc/self/maps").read_text().count("memfd:penstock")
    return len(os.listdir("/proc/self/fd")), blocks, len(os.listdir("/proc/self/task"))


def is_more(now: tuple[int, ...], before: tuple[int, ...]) -> bool:
    """Of anything; there may be less, since something else in this process has ended."""
    return any(one > other for one, other in zip(now, before, strict=True))


def drops_its_transports(transport: Any) -> list[tuple[int, int, int]]:
    transport.open(CHANNELS)
    transport.exchange(None)
    seen = [held()]
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
        until = time.monotonic() + TIMEOUT
        while is_more(now := held(), seen[0]) and time.monotonic() < until:
            time.sleep(0.02)  # its watch ends
        seen.append(now)
    return seen


def test_a_transport_that_nobody_closed_holds_nothing_when_it_is_gone() -> None:
    for seen in values(run("shared", drops_its_transports)):
        assert not is_more(seen[3], seen[0]), seen
