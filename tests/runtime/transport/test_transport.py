"""What every transport must do alike, on threads (buffered and not) and on processes (gloo and shared memory)."""

from __future__ import annotations

import enum
import io
import random
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from tiers import mostly_slow
from torch.utils import _pytree as pytree
from transport_harness import run, values
from transports import KINDS, ON_PROCESSES, TRANSPORTS

from penstock.runtime.state.memory_layout import regions
from penstock.runtime.transport import Channel

FORTH, BACK, SKIP = 0, 1, 2


CHANNELS = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0), Channel(0, 3, "F", 0, 1)]


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


class Colour(enum.Enum):
    RED = "red"


def pair(transport: Any) -> None:
    transport.open(CHANNELS)


def same(left: Any, right: Any) -> bool:
    """Equal in type, content, dtype, shape, `requires_grad`, and in how it lies in memory."""
    if isinstance(left, torch.Tensor):
        raw = [
            tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
            for tensor in (left, right)
        ]
        return (
            (left.dtype, left.shape, left.requires_grad) == (right.dtype, right.shape, right.requires_grad)
            and (left.stride(), left.data_ptr() % 64) == (right.stride(), right.data_ptr() % 64)
            and right.is_leaf
            and torch.equal(*raw)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def overlaps(value: Any, like: Any) -> list[Any]:
    """Which tensors of a value share memory, and where in it they start; but for the conjugates in `like`."""
    pairs = zip(pytree.tree_leaves(value), pytree.tree_leaves(like), strict=True)
    tensors = [
        leaf for leaf, other in pairs if isinstance(leaf, torch.Tensor) and not (other.is_conj() or other.is_neg())
    ]
    found = [(region, [tensors[member].data_ptr() for member in region.members]) for region in regions(tensors)]
    return [(region.members, region.nbytes, [start - region.address for start in starts]) for region, starts in found]


def sample_values() -> list[Any]:
    torch.manual_seed(0)
    every = [torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES]
    weight = torch.randn(4, 6, requires_grad=True)
    return [
        *every,
        tuple(every),
        every,
        weight * 2,
        weight,
        weight.detach(),
        torch.nn.Parameter(torch.ones(2)),
        torch.randn(4, 6).t(),
        torch.randn(1, 6).expand(4, 6),
        torch.randn(8, 8)[::2, 1::3],
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.tensor(3.5),
        torch.empty(0, 7),
        torch.randn(0, requires_grad=True) * 1,
        (weight * 3, None, torch.arange(4)),
        [None, None],
        (),
        None,
        7,
        "text",
        {"hidden": weight * 1, "mask": torch.ones(3, dtype=torch.bool), "flag": True, "name": "x", "n": None},
        OrderedDict(a=torch.ones(1), b=(1, 2.5, [torch.zeros(2), b"bytes"])),
        {"colour": Colour.RED, "nested": {"deep": [({"deeper": torch.ones(2)},)]}},
        (torch.randn(600, 500), torch.randn(3), torch.randn(600_000).half(), None),
        torch.randn(1000, 300, requires_grad=True) * 1,
        torch.randn(1000, 300).t(),
        *(value for rows in (7, 7000) for value in strange_values(rows)),  # packed and direct
    ]


def strange_values(rows: int) -> list[Any]:
    """Tensors that do not lie as torch would lay them, and tensors that share memory."""
    x = torch.randn(rows, 45)
    base = torch.randn(rows, 45, requires_grad=True) * 1
    z = torch.randn(rows, 23, dtype=torch.complex64)
    return [
        x.flatten()[3:].view(-1),
        x.flatten()[45:].view(rows - 1, 45),
        x.bfloat16().flatten()[1:],
        x.t()[1:],
        x[:, 1:],
        x[:, 3],
        x[:, 1::4].t(),
        x[1:2].expand(rows, 45),
        x[:, 1:2].expand(rows, 45),
        x.flatten()[1:].unfold(0, 9, 5),
        z[:, 1:].conj(),
        (z, z.conj(), z.conj().imag),
        (x, x),
        (base, base[:, :4]),
        [base[:, :4], base],
        (x[:, 1:5], x[:, 3:9]),  # what neither has is not sent
        x[:, :42].chunk(3, dim=1),
        (x[: rows // 2], x[rows // 2 :]),  # side by side: apart
        {"x": x, "flat": x.flatten()[1:], "numbers": x.view(torch.int32)[1], "other": torch.randn(3)},
    ]


def echo_everything(transport: Any, steps: int) -> list[str]:
    """Rank 1 sends back what it gets; rank 0 compares."""
    pair(transport)
    faults = []
    samples = sample_values()
    for step in range(steps):
        for microbatch, value in enumerate(samples):
            if transport.rank == 0:
                transport.post(BACK, microbatch)
                transport.send(FORTH, microbatch, value)
                back = transport.receive(BACK, microbatch)
                if not same(value, back) or overlaps(value, value) != overlaps(back, value):
                    faults.append(f"step {step}: {value} came back as {back}")
            else:
                transport.send(BACK, microbatch, transport.receive(FORTH, microbatch))
        transport.flush()
        transport.exchange(None)
    return faults


@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_and_pytree_comes_back_as_it_went_also_when_predicted(kind: str) -> None:
    assert values(run(kind, echo_everything, steps=3))[0] == []


def is_detached(transport: Any) -> Any:
    pair(transport)
    weight = torch.ones(2, requires_grad=True)
    if transport.rank == 0:
        for microbatch in range(2):
            transport.send(FORTH, microbatch, weight * 2)
        transport.flush()
        return weight.grad is None
    came = [transport.receive(FORTH, microbatch) for microbatch in range(2)]
    (came[0] * came[1]).sum().backward()
    return all(tensor.is_leaf and torch.equal(tensor.grad, torch.full((2,), 2.0)) for tensor in came)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_received_is_a_leaf_of_a_graph_of_its_own(kind: str) -> None:
    assert values(run(kind, is_detached)) == [True, True]


def random_program(seed: int) -> list[tuple[int, int]]:
    """(channel, microbatch) in the order in which rank 0 sends and rank 1 posts: channels interleaved at random."""
    chance = random.Random(seed)
    lists = {FORTH: list(range(6)), SKIP: list(range(6))}
    order = []
    while any(lists.values()):
        channel = chance.choice([channel for channel, rest in lists.items() if rest])
        order.append((channel, lists[channel].pop(0)))
    return order


def shapes_change(transport: Any, seed: int, early: bool) -> int:
    """Shapes change at random between microbatches and steps, under receives that were posted at random depths."""
    pair(transport)
    checked = 0
    for step in range(6):
        order = random_program(seed + step)
        chance = random.Random(seed * 100 + step)  # the same on both ranks
        sizes = {key: chance.choice([0, 1, 3, 3, 3, 50, 300_000]) for key in order}
        if step in (2, 4):
            sizes = dict.fromkeys(order, 3)
        if transport.rank == 0:
            for key in order:
                content = float(key[0] * 100 + key[1] + step * 1000)
                transport.send(*key, (torch.full((sizes[key],), content), {"size": sizes[key]}))
        else:
            depth = chance.randint(1, 8) if early else 0
            posted = 0
            uses = list(order)
            for index in range(len(order)):
                while early and posted < min(len(order), index + depth):
                    transport.post(*order[posted])
                    posted += 1
                # of what is posted, use any: not always the oldest
                window = [key for key in order[: max(posted, index + 1)] if key in uses]
                key = chance.choice(window)
                uses.remove(key)
                tensor, plain = transport.receive(*key)
                assert plain["size"] == sizes[key] == tensor.numel()
                assert tensor.eq(float(key[0] * 100 + key[1] + step * 1000)).all()
                checked += 1
        transport.flush()
        transport.exchange(step)
    return checked


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("early", [True, False])
def test_shapes_may_change_at_will_under_receives_posted_early(kind: str, early: bool) -> None:
    for seed in range(1 if kind in ON_PROCESSES else 5):
        if kind == "threads-0" and not early:
            continue  # nothing is posted ahead and nothing is buffered: only the strict order could work
        assert values(run(kind, shapes_change, seed=seed, early=early))[1] == 72


def both_ways(transport: Any, size: int) -> bool:
    """Both ranks send first, which blocking calls would not survive."""
    pair(transport)
    mine, theirs = (FORTH, BACK) if transport.rank == 0 else (BACK, FORTH)
    for _ in range(3):
        for microbatch in range(3):
            transport.post(theirs, microbatch)
        for microbatch in range(3):
            transport.send(mine, microbatch, torch.full((size,), float(microbatch)))
        for microbatch in range(3):
            assert transport.receive(theirs, microbatch)[-1] == microbatch
        transport.flush()
        transport.exchange(None)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_large_messages_both_ways_at_once_do_not_block_each_other(kind: str) -> None:
    assert values(run(kind, both_ways, size=2_000_000)) == [True, True]


def channels_apart(transport: Any) -> list[Any]:
    """A channel that nobody reads yet must not hold up another one between the same ranks."""
    pair(transport)
    if transport.rank == 0:
        transport.send(SKIP, 0, "skip")
        transport.send(FORTH, 0, "forth")
        transport.flush()
        return []
    transport.post(SKIP, 0)
    return [transport.receive(FORTH, 0), transport.receive(SKIP, 0)]


@pytest.mark.parametrize("kind", KINDS)
def test_channels_between_the_same_ranks_neither_mix_nor_wait_for_each_other(kind: str) -> None:
    assert values(run(kind, channels_apart))[1] == ["forth", "skip"]


def reopen(transport: Any) -> list[Any]:
    """A program for training and one for evaluation, in turn."""
    came = []
    for step in range(4):
        transport.open(CHANNELS if step % 2 == 0 else [CHANNELS[2]])
        channel = FORTH if step % 2 == 0 else 0
        if transport.rank == 0:
            transport.send(channel, 0, torch.full((step % 2 + 1,), float(step)))
        else:
            came.append(transport.receive(channel, 0).tolist())
        transport.flush()
        transport.exchange(None)
    return came


@pytest.mark.parametrize("kind", KINDS)
def test_another_program_may_be_opened_between_steps(kind: str) -> None:
    assert values(run(kind, reopen))[1] == [[0.0], [1.0, 1.0], [2.0], [3.0, 3.0]]


def two_programs_in_one_step(transport: Any) -> Any:
    """The batch goes out on channels of its own before the program's: no exchange between the two."""
    batch = [Channel(-1, 1, "F", 0, 1)]
    came = []
    for step in range(3):
        for channels in (batch, CHANNELS):
            transport.open(channels)
            if transport.rank == 0:
                transport.send(0, 0, (torch.full((300_000,), float(step)), len(channels)))
            else:
                tensor, number = transport.receive(0, 0)
                came.append((tensor[-1].item(), number))
        transport.flush()
        transport.exchange(None)
    return came


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_two_programs_in_one_step_do_not_mix(kind: str) -> None:
    assert values(run(kind, two_programs_in_one_step))[1] == [(float(step), n) for step in range(3) for n in (1, 3)]


Point = namedtuple("Point", "x y")


def bounded(transport: Any, count: int) -> float:
    """The growth of resident memory in MiB, while twice `count` messages of 256 KiB are sent."""
    pair(transport)
    value = torch.ones(1 << 16)
    peak = 0

    def resident() -> float:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 2**20

    before = 0.0
    for step in range(3):
        for microbatch in range(count):
            if transport.rank == 0:
                transport.send(FORTH, microbatch, value * 1)
                transport.receive(BACK, microbatch)
            else:
                transport.receive(FORTH, microbatch)
                transport.send(BACK, microbatch, None)
            if step:
                peak = max(peak, resident())
        transport.exchange(None)
        if not step:
            before = resident()
    return peak - before


@pytest.mark.parametrize("kind", mostly_slow(TRANSPORTS, "threads", "shared"))
def test_memory_does_not_grow_with_the_number_of_messages(kind: str) -> None:
    assert max(values(run(kind, bounded, count=340))) < 40


ODD = [torch.arange(3, dtype=torch.float64), torch.arange(3, dtype=torch.int8)]  # 27 bytes: no number of doubles


def saves_what_it_receives(transport: Any) -> list[bytes]:
    pair(transport)
    saved = []
    for number in range(3):
        if transport.rank == 0:
            transport.send(0, number, ODD)
        else:
            transport.post(0, number)
            for tensor in transport.receive(0, number):
                torch.save(tensor, file := io.BytesIO())
                saved.append(file.getvalue())
    transport.flush()
    transport.exchange(None)
    return saved


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_what_was_received_can_be_saved_and_loaded(kind: str) -> None:
    """torch.save writes a storage that is no number of whole elements in such a way that torch.load refuses it."""
    saved = values(run(kind, saves_what_it_receives))[1]
    assert len(saved) == 6
    for number, content in enumerate(saved):
        assert torch.equal(torch.load(io.BytesIO(content)), ODD[number % 2])
