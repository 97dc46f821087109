"""What only shared memory can get wrong: a block written while it is read, memory that runs out, things left behind."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import resource
import signal
import socket
import threading
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import mostly_slow
from transport_harness import run, values

from penstock.errors import PeerFailure, UsageError
from penstock.runtime.transport import Channel
from penstock.runtime.transport.layout.layout import Layout, flatten
from penstock.runtime.transport.own_socket import path_of
from penstock.runtime.transport.shared_memory import blocks, meeting
from penstock.runtime.transport.shared_memory import connection as pair
from penstock.runtime.transport.shared_memory.transport import SharedMemoryTransport

FORTH, BACK, SKIP = 0, 1, 2
PAIR = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0), Channel(0, 3, "F", 0, 1)]
SMALL = 1 << 16


def content(number: int, size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int64) * 31 + number


def mapped() -> int:
    """How many blocks this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:penstock")


def checks_what_it_holds(transport: Any, count: int, steps: int, seed: int) -> int:
    """Messages of random sizes; rank 1 keeps random ones for a random while, and looks at each again before it goes."""
    transport.open(PAIR)
    chance = random.Random(seed)  # the same on both ranks
    own = random.Random(seed + 1 + transport.rank)
    checked = 0
    held: deque[tuple[int, int, torch.Tensor]] = deque()

    def look() -> None:
        nonlocal checked
        number, size, tensor = held.popleft()
        assert torch.equal(tensor, content(number, size)), f"message {number} was overwritten"
        checked += 1

    for step in range(steps):
        plan = [
            (chance.choice((FORTH, SKIP)), chance.choice((1, 7, 500, 600, 5000, 70_000, 200_000))) for _ in range(count)
        ]
        order = {FORTH: 0, SKIP: 0}
        for index, (channel, size) in enumerate(plan):
            number, microbatch = step * count + index, order[channel]
            order[channel] += 1
            if transport.rank == 0:
                transport.send(channel, microbatch, (content(number, size), {"number": number % 3}))
                if own.random() < 0.02:
                    time.sleep(own.random() / 1000)
                continue
            tensor, plain = transport.receive(channel, microbatch)
            assert plain == {"number": number % 3}
            if own.random() < 0.1:
                tensor.add_(0)  # in place is the receiver's right: the memory is its own for now
            held.append((number, size, tensor.view(-1)[:]))  # a view of a view keeps it too
            while len(held) > own.randint(0, 12):
                look()
        transport.exchange(None)
    while held:
        look()
    return checked


@pytest.mark.parametrize("seed", mostly_slow([0, 1], 0))
def test_a_block_in_use_is_never_written(seed: int) -> None:
    assert values(run("shared", checks_what_it_holds, count=600, steps=3, seed=seed))[1] == 1800


def graph_keeps_the_block(transport: Any) -> bool:
    """Only the graph of a product still knows the tensors that came; their blocks must not be used again."""
    transport.open(PAIR)
    count = 20
    if transport.rank == 0:
        for microbatch in range(count):
            transport.send(FORTH, microbatch, torch.full((1000,), float(microbatch), requires_grad=True))
        transport.exchange(None)
        return True
    weight = torch.ones(1000, requires_grad=True)
    roots = []
    for microbatch in range(count):
        came = transport.receive(FORTH, microbatch)
        roots.append((came * weight).sum())
        del came
    gc.collect()
    for microbatch, root in enumerate(roots):
        weight.grad = None
        root.backward()
        assert weight.grad is not None
        assert weight.grad.eq(float(microbatch)).all()
    transport.exchange(None)
    return True


def test_what_a_graph_has_saved_keeps_its_block() -> None:
    assert values(run("shared", graph_keeps_the_block)) == [True, True]


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


def shapes_grow(transport: Any) -> list[int]:
    """A longer sequence every step: what each side has mapped after each."""
    transport.open(PAIR)
    seen = []
    for step in range(24):
        value = torch.full((1000 * (step + 1),), float(step))
        if transport.rank == 0:
            for microbatch in range(4):
                transport.send(FORTH, microbatch, value)
        else:
            held = [transport.receive(FORTH, microbatch) for microbatch in range(4)]
            assert all(torch.equal(came, value) for came in held)
            del held
        transport.exchange(None)
        seen.append(mapped())
    if transport.rank == 1:  # a last message brings the news of what was given up
        transport.receive(FORTH, 0)
    else:
        transport.send(FORTH, 0, None)
    transport.exchange(None)
    return seen


def test_blocks_that_no_shape_needs_any_more_are_given_up() -> None:
    for seen in values(run("shared", shapes_grow)):
        assert max(seen) < 40  # of 24 shapes with four blocks each


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


def has_little_memory(transport: Any, limit: int) -> Any:
    """Blocks up to a limit, then none."""
    if transport.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # a memfd is a file to the kernel
    transport.open(PAIR)
    steps, messages = 3, 12
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(steps):
            for microbatch in range(messages):
                size = 100 if microbatch % 3 else 200_000
                value = (content(step * 100 + microbatch, size), {"n": microbatch})
                if transport.rank == 0:
                    transport.send(FORTH, microbatch, value)
                else:
                    transport.post(FORTH, microbatch)
            if transport.rank == 1:
                for microbatch in random.Random(step).sample(range(messages), messages):
                    size = 100 if microbatch % 3 else 200_000
                    if (step, microbatch) == (1, 4):
                        assert transport.discard(FORTH, microbatch) is None
                        continue
                    tensor, plain = transport.receive(FORTH, microbatch)
                    assert torch.equal(tensor, content(step * 100 + microbatch, size))
                    assert plain == {"n": microbatch}
            transport.flush()
            transport.exchange(None)
    return [str(warning.message) for warning in told], transport.wire(0, 1)


@pytest.mark.parametrize("limit", [1 << 20, 1 << 14])
def test_where_memory_is_refused_messages_take_the_long_way_and_the_user_is_told_once(limit: int) -> None:
    (told, wire), (quiet, _) = values(run("shared", has_little_memory, limit=limit))
    assert len(told) == 1
    assert "rank 0 gets no more shared memory for its link to rank 1 (File too large" in told[0]
    assert "torch.distributed (gloo), shared memory was refused" in wire
    assert quiet == []


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
    sockets = (transport._meeting._listener, transport._bell._socket)
    inodes = [os.fstat(each.fileno()).st_ino for each in sockets]
    assert all(inode in listening() for inode in inodes)
    Path(folder, str(transport.rank)).write_text(" ".join(map(str, inodes)))
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
    inodes = {int(inode) for path in tmp_path.iterdir() for inode in path.read_text().split()}
    assert len(inodes) == 4
    assert not inodes & listening()
    found = leftovers()
    if found:  # another test is just making a socket
        time.sleep(1)
    assert not found & leftovers()
    assert mapped() == 0


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
        address = transport._meeting.place(0).address
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
    said = transport.wire(0, 1)
    transport.close()
    return said


@pytest.mark.parametrize(
    ("how", "reason"), [("host", "on different hosts"), ("refused", "rank 1 cannot connect to rank 0")]
)
def test_ranks_that_are_not_near_use_torch_distributed(how: str, reason: str) -> None:
    for wire in values(run("shared", far_apart, how=how)):
        assert wire.startswith("torch.distributed (gloo)")
        assert reason in wire


def two_hosts(transport: Any) -> Any:
    """Ranks 0 and 1 on one host, 2 seems to be on another: each link takes its own way, in one program."""
    transport.close()
    if transport.rank == 2:
        meeting.this_host = lambda: "another host"
    transport = SharedMemoryTransport(timeout=10, coordinator=2)
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
    said = [transport.wire(0, 1), transport.wire(1, 2)]
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


def test_memory_is_allocated_at_once_and_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = blocks.allocate(100_000)
    try:
        assert os.fstat(descriptor).st_blocks * 512 >= 100_000
        for size in (10, 1_000_000):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = len(os.listdir("/proc/self/fd"))
    ring = blocks.Ring(lambda number, descriptor: None, lambda number: None)
    layout = Layout.of(flatten(torch.zeros(100)), False).all_packed()
    assert ring.take(layout, 0) is None
    assert ring.refused is not None
    assert ring.refused.strerror == "No space left on device"
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("nbytes", [0, 1, 64, 4096, 4097, 100_000, 1 << 20, (1 << 20) + 64, 123_456_789])
def test_sizes_are_whole_pages_and_waste_little(nbytes: int) -> None:
    size = blocks.size_class(nbytes)
    assert size % blocks.PAGE == 0
    assert nbytes <= size <= max(nbytes * 1.126, nbytes + blocks.PAGE)


def test_words_are_stored_whole() -> None:
    """The two sides meet in aligned words of eight bytes, which memoryview stores in one piece."""
    memory = blocks.map_memory(descriptor := blocks.allocate(64))
    os.close(descriptor)
    words = memory.cast("Q")
    words[0] = 0x0102_0304_0506_0708
    assert ctypes.c_uint64.from_buffer(memory).value == 0x0102_0304_0506_0708
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 64 == 0
