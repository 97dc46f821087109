"""Blocks of shared memory: never written while they are read, no more of them than are needed, and none left behind."""

from __future__ import annotations

import gc
import os
import random
import resource
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import mostly_exhaustive
from transport_harness import run, values

from penstock.runtime.transport import Channel
from penstock.runtime.transport.layout.layout import Layout, flatten
from penstock.runtime.transport.shared_memory import blocks
from penstock.runtime.transport.shared_memory.blocks import allocate, map_memory

FORTH, BACK, SKIP = 0, 1, 2


PAIR = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0), Channel(0, 3, "F", 0, 1)]


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


@pytest.mark.parametrize("seed", mostly_exhaustive([0, 1], 0))
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
    return [str(warning.message) for warning in told], transport.describe_link(0, 1)


@pytest.mark.parametrize("limit", [1 << 20, 1 << 14])
def test_where_memory_is_refused_messages_take_the_long_way_and_the_user_is_told_once(limit: int) -> None:
    (told, wire), (quiet, _) = values(run("shared", has_little_memory, limit=limit))
    assert len(told) == 1
    assert "rank 0 gets no more shared memory for its link to rank 1 (File too large" in told[0]
    assert "torch.distributed (gloo), shared memory was refused" in wire
    assert quiet == []


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
    pool = blocks.BlockPool(lambda number, descriptor: None, lambda number: None)
    layout = Layout.of(flatten(torch.zeros(100)), False).all_packed()
    assert pool.put(layout, [torch.zeros(100)], 0) is None
    assert pool.refused is not None
    assert pool.refused.strerror == "No space left on device"
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("nbytes", [0, 1, 64, 4096, 4097, 100_000, 1 << 20, (1 << 20) + 64, 123_456_789])
def test_sizes_are_whole_pages_and_waste_little(nbytes: int) -> None:
    size = blocks.size_class(nbytes)
    assert size % blocks.PAGE == 0
    assert nbytes <= size <= max(nbytes * 1.126, nbytes + blocks.PAGE)


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
