"""A link between two devices, on a backend that only notes what is queued: its order, and who waits for what.

What needs a device (streams, races, communicators) is in `test_device_link_on_devices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PeerFailure
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.distributed.device_link import DeviceLink, make_backend
from penstock.runtime.transport.layout.layout import Layout, flatten

HERE = torch.device("cpu")
CHANNEL = Channel(0, 1, "F", 0, 1)


class Work:
    """An operation that ends when the test lets it."""

    def __init__(self) -> None:
        self.done = False
        self.waits = 0

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.waits += 1


class Queue:
    """A backend of two ranks that moves nothing."""

    def __init__(self) -> None:
        self.queued: list[tuple[str, Tensor, Work]] = []
        self.ended: list[str] = []

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._queue(f"send to {peer}", tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._queue(f"receive from {peer}", tensors)

    def _queue(self, what: str, tensors: list[Tensor]) -> Work:
        (tensor,) = tensors
        self.queued.append((what, tensor, Work()))
        return self.queued[-1][2]

    def abort(self) -> None:
        self.ended.append("abort")

    def shutdown(self) -> None:
        self.ended.append("shutdown")


@contextmanager
def guard(peer: int, channel: Channel | None, microbatch: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerFailure(peer, str(error), microbatch=microbatch) from error


def link(number: int, now: Any = lambda: 0.0) -> tuple[DeviceLink, Queue]:
    queue = Queue()
    return DeviceLink(queue, 1 - number, number, HERE, guard, now), queue


def layout_of(size: int) -> Layout:
    """The layout of one tensor on a device, and of so many bytes."""
    content = Layout.of(flatten(torch.empty(size, dtype=torch.uint8)), True).content
    slot = content.slots[0]
    assert slot is not None
    return Layout(content._replace(slots=(slot._replace(device="cuda"),)))


def test_receives_are_queued_in_the_order_of_the_announcements_and_in_their_sizes() -> None:
    """A communicator has no tags: whatever is wanted first, the k-th receive meets the k-th send."""
    end, queue = link(1)
    sizes = [3, 200, 70]
    first, second, third = [end.announce(layout_of(size), CHANNEL, number) for number, size in enumerate(sizes)]
    end.drop(second)
    assert [(what, tensor.numel()) for what, tensor, _ in queue.queued] == [
        ("receive from 0", 3),
        ("receive from 0", 200),
    ]
    end.drop(first)
    assert len(queue.queued) == 2  # it was received already
    end.drop(third)
    assert [tensor.numel() for _, tensor, _ in queue.queued] == sizes


def test_what_nobody_wants_takes_one_place() -> None:
    """After an out-of-memory error there may be no memory for what the others have sent meanwhile."""
    end, queue = link(1)
    for number, size in enumerate([500, 20, 500]):
        end.drop(end.announce(layout_of(size), CHANNEL, number))
    assert len({tensor.data_ptr() for _, tensor, _ in queue.queued}) == 1


def test_a_payload_that_has_left_is_let_go_and_the_stream_waits_for_what_is_lent_only() -> None:
    end, queue = link(0)
    lent, packed = torch.ones(4), torch.ones(3)
    end.send((packed, None), CHANNEL, 0)
    end.send((lent, lent), CHANNEL, 1)
    end.send((packed, None), CHANNEL, 2)
    works = [work for _, _, work in queue.queued]
    assert [what for what, _, _ in queue.queued] == ["send to 1"] * 3
    assert end.flush() == []
    assert [work.waits for work in works] == [0, 1, 0]
    assert end.flush() == []
    assert [work.waits for work in works] == [0, 1, 0]  # it waits for each once
    works[0].done = True
    end.send((packed, None), CHANNEL, 3)
    works[1].done = works[2].done = queue.queued[-1][2].done = True
    assert end.waiting() is None


def test_a_tensor_that_is_written_to_before_the_step_has_ended_is_found() -> None:
    end, queue = link(0)
    for microbatch in range(3):
        lent = torch.ones(4)
        end.send((lent, lent), CHANNEL, microbatch)
        if microbatch == 1:
            lent.add_(1)
    queue.queued[0][2].done = queue.queued[1][2].done = True
    assert end.flush() == [(CHANNEL, 1)]
    assert end.flush() == []


def test_the_watch_sees_for_what_a_device_waits_and_since_when() -> None:
    times = iter([10.0, 20.0, 30.0])
    end, queue = link(0, lambda: next(times))
    assert end.waiting() is None
    for microbatch in (4, 5):
        end.send((torch.ones(1), None), CHANNEL, microbatch)
    for _ in range(2):
        waiting = end.waiting()
        assert waiting is not None
        assert (waiting.peer, waiting.edge, waiting.microbatch, waiting.since) == (1, CHANNEL, 4, 10.0)
    queue.queued[0][2].done = True
    waiting = end.waiting()
    assert waiting is not None
    assert (waiting.microbatch, waiting.since) == (5, 20.0)  # something has moved on, so it waits anew


@pytest.mark.parametrize(("done", "ended"), [(True, ["shutdown"]), (False, ["abort", "shutdown"])])
def test_closing_ends_kernels_that_wait_for_a_peer(done: bool, ended: list[str]) -> None:
    end, queue = link(0)
    end.send((torch.ones(1), None), CHANNEL, 0)
    queue.queued[0][2].done = done
    end.close()
    assert queue.ended == ended


def test_an_error_of_the_backend_is_the_loss_of_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    end, queue = link(0)

    def broken(*_: Any) -> Any:
        raise RuntimeError("NCCL communicator was aborted")

    monkeypatch.setattr(queue, "send", broken)
    with pytest.raises(PeerFailure, match=r"rank 1 .*NCCL communicator was aborted"):
        end.send((torch.ones(1), None), CHANNEL, 0)


def test_a_backend_of_two_ranks_is_made_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """`new_group` needs all ranks of the world, in particular after `init_process_group(device_id=...)`."""
    made: list[Any] = []

    def simple(store: Any, rank: int, size: int, timeout: timedelta) -> str:
        made.append((store, rank, size, timeout))
        return "simple"

    def extended(options: Any, backend_options: Any) -> str:
        made.append((options.store, options.group_rank, options.group_size, options.timeout))
        assert list(options.global_ranks_in_group) == [4, 2]  # what torch says of a communicator in its own words
        return "extended"

    kinds = dist.Backend._plugins
    monkeypatch.setitem(kinds, "SIMPLE", kinds_entry(simple, False))
    monkeypatch.setitem(kinds, "EXTENDED", kinds_entry(extended, True))
    store, limit = dist.HashStore(), timedelta(seconds=7)
    assert make_backend("simple", store, 1, "one", limit, [4, 2]) == "simple"
    assert make_backend("extended", store, 0, "two", limit, [4, 2]) == "extended"
    assert [(rank, size, timeout) for _, rank, size, timeout in made] == [(1, 2, limit), (0, 2, limit)]


def kinds_entry(creator: Any, is_extended: bool) -> Any:
    return dist.Backend._BackendPlugin(creator, is_extended)  # type: ignore[attr-defined]
