"""The way of tensors from the device of one rank to the device of another: a communicator for each directed pair.

NCCL and its relatives have no tags. A communicator runs its operations one after the other, in the order of the calls;
a send ends when its receive runs, and sizes must agree. With both directions of two ranks on one communicator, as
torch has them, two ranks that first post a receive and then send wait for each other for ever. So each direction has
its own, made when channels are opened, and connected before the first step: a connection that is made at its first use
blocks both hosts.

The protocol. Every message is announced to the receiver's host by a frame of gloo, which says its layout. Then the
sender's host queues one send of all its tensors. The receiver queues the receive of an
announced message where it needs it, after those of all that were announced before it: so sends and receives
pair up in any verified program, sizes agree whatever the shapes, and a message that holds a failure has no
tensors. An announcement waits for the peer's host and never for a device, so hosts run ahead of their devices.

A host may also wait for all that its device has to do, its sends among it: in a user's `synchronize()`, where memory is
given back, or a kernel is loaded (NCCL's documentation states that any call of CUDA may). If two ranks do so, each
behind a send to the other, neither comes to where it needs what the other sends. So a thread beside the rank takes what
was announced a moment ago, and queues its receive (`catch_up`).

A tensor is kept until its send has ended, as the device reports when it is asked. The stream that computes waits for a
send at the end of a step only, and only where the memory is still the user's: nothing that a peer waits for follows.
What comes is received into memory of a stream that does nothing else, so that it need not wait for what is computed;
the stream that computes waits for it, and the allocator knows that it uses the memory (`record_stream`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _DistributedBackendOptions

from penstock.errors import PenstockError
from penstock.runtime.state.ownership import version_of
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.failure.blame import Waiting
from penstock.runtime.transport.layout.layout import Layout

Payload = tuple[Tensor, Tensor | None]  # what travels, and the tensor in whose memory that is, if in one's
Guard = Callable[[int, Channel | None, int], AbstractContextManager[None]]  # names the peer, if what is inside fails


class Departure(NamedTuple):
    """A payload on its way. `lender`: the user's tensor in whose memory it is, with the version that it must keep."""

    channel: Channel
    microbatch: int
    memory: Tensor
    work: Any
    lender: tuple[Tensor, int] | None


class Arrival:
    """An announced payload; `work` is there once its receive is queued, and `memory` until somebody has it."""

    __slots__ = ("channel", "layout", "memory", "microbatch", "work")

    def __init__(self, layout: Layout, channel: Channel, microbatch: int) -> None:
        self.layout, self.channel, self.microbatch = layout, channel, microbatch
        self.memory: Tensor | None = None
        self.work: Any = None


class DeviceLink:
    """This rank's end of a communicator of two ranks, of which `number` 0 sends and 1 receives."""

    def __init__(
        self, backend: Any, peer: int, number: int, device: torch.device, guard: Guard, now: Callable[[], float]
    ) -> None:
        self.backend, self.peer, self.device = backend, peer, device
        self.messages = 0  # Counted with those that have no tensors.
        # Messages whose frames nobody has taken, as pairs of an end and a microbatch.
        self.posted: deque[tuple[Any, int]] = deque()
        # Held by the one of two threads that takes messages; and what went wrong on the one that is not the rank's own.
        self.taking = threading.Lock()
        self.error: Exception | None = None
        self._is_full = False  # There was no memory for what nobody wanted yet.
        self._other = 1 - number
        self._guard = guard
        self._now = now
        self._stream = torch.Stream(device=device)
        self._announced: deque[Arrival] = deque()
        self._arriving: deque[Arrival] = deque()
        self._departing: deque[Departure] = deque()
        self._rewritten: list[tuple[Channel, int]] = []
        self._scratch: Tensor | None = None  # takes what nobody wants, while a failed step is drained
        self._head: tuple[Arrival | Departure | None, float] = (None, 0.0)  # what the watch saw first in line

    # -- out

    def send(self, payload: Payload | None, channel: Channel, microbatch: int) -> None:
        """Queue the send of an announced message, if it has a payload."""
        self.messages += 1
        while self._departing and self._departing[0].work.is_completed():
            self._check_unchanged(self._departing.popleft())
        if payload is None:
            return
        memory, lender = payload
        with self._guard(self.peer, channel, microbatch):
            work = self.backend.send([memory], self._other, 0)
        lent = None if lender is None else (lender, version_of(lender))
        self._departing.append(Departure(channel, microbatch, memory, work, lent))

    def _check_unchanged(self, departed: Departure) -> None:
        if departed.lender is not None and version_of(departed.lender[0]) != departed.lender[1]:
            self._rewritten.append((departed.channel, departed.microbatch))

    def flush(self) -> list[tuple[Channel, int]]:
        """Let the current stream wait for what leaves from memory that is not ours; returns what was written to.

        The operations of a communicator end in order, so the last of them is enough.
        """
        lent = [each for each in self._departing if each.lender is not None]
        if lent:
            with self._guard(self.peer, lent[-1].channel, lent[-1].microbatch):
                lent[-1].work.wait()
            self._departing = deque(each._replace(lender=None) for each in self._departing)
        for each in lent:
            self._check_unchanged(each)
        rewritten, self._rewritten = self._rewritten, []
        return rewritten

    # -- in

    def announce(self, layout: Layout, channel: Channel, microbatch: int) -> Arrival:
        """Expect one more payload, after all that were announced before; they are sent in this order."""
        arrival = Arrival(layout, channel, microbatch)
        self._announced.append(arrival)
        return arrival

    def take(self, arrival: Arrival) -> Tensor:
        """Return the memory of an announced payload, for which the current stream waits."""
        self._is_full = False
        with self._guard(self.peer, arrival.channel, arrival.microbatch):
            while arrival.work is None:
                self._receive_next()
            memory, arrival.memory = arrival.memory, None
            assert memory is not None, "nobody takes a payload twice"
            arrival.work.wait()
        memory.record_stream(torch.accelerator.current_stream(self.device))
        return memory

    def drop(self, arrival: Arrival) -> None:
        """Receive a payload that nobody wants, all into one place: in memory that is full there may be no other."""
        if arrival.memory is not None and (self._scratch is None or self._scratch.numel() < arrival.memory.numel()):
            self._scratch = arrival.memory
        while arrival.work is None:
            size = self._announced[0].layout.device_bytes
            with self._stream, self._guard(self.peer, arrival.channel, arrival.microbatch):
                if self._scratch is None or self._scratch.numel() < size:
                    self._scratch = torch.empty(size, dtype=torch.uint8, device=self.device)
                self._receive(self._scratch[:size])

    def receive_announced(self) -> None:
        """Queue the receives of all that is announced: a sender's host may wait until its device has sent it."""
        while self._announced:
            first = self._announced[0]
            with self._guard(self.peer, first.channel, first.microbatch):
                self._receive_next()

    def catch_up(self) -> None:
        """Take messages that have come, and queue their receives: on a thread beside the rank, which may be held up."""
        if self.error is not None or self._is_full or not self.taking.acquire(blocking=False):
            return
        try:
            while self.posted and self.posted[0][0].has_come(self.posted[0][1]):
                end, microbatch = self.posted.popleft()
                end.take_early(microbatch)
            while self._announced:
                self._receive_next()
        except torch.OutOfMemoryError:  # There may be memory when the rank itself comes to it.
            self._is_full = True
        except (RuntimeError, PenstockError) as error:
            self.error = error
        finally:
            self.taking.release()

    def _receive_next(self) -> None:
        with self._stream:
            self._receive(self._announced[0].layout.blank_on_device(self.device))

    def _receive(self, memory: Tensor) -> None:
        """Queue the receive of the payload that was announced first."""
        while self._arriving and self._arriving[0].work.is_completed():
            self._arriving.popleft()
        first = self._announced[0]
        first.memory, first.work = memory, self.backend.recv([memory], self._other, 0)
        self._arriving.append(self._announced.popleft())

    def end_step(self) -> None:
        """Forget what a failed step needed; what it left under way is nobody's any more."""
        self._scratch = None
        if any(each.lender is not None for each in self._departing):
            self._departing = deque(each._replace(lender=None) for each in self._departing)
        self._rewritten.clear()

    # -- from the thread of the watch

    def waiting(self) -> Waiting | None:
        """Return what the device has waited for, since the watch first saw it at the head of the line."""
        queued: list[Arrival | Departure] = [*tuple(self._arriving), *tuple(self._departing)]
        head = next((each for each in queued if not each.work.is_completed()), None)
        if head is not self._head[0]:
            self._head = head, self._now()
        return None if head is None else Waiting(self.peer, head.channel, head.microbatch, self._head[1])

    def abort(self) -> None:
        """End the kernels that wait for the peer."""
        with suppress(RuntimeError):
            self.backend.abort()

    def close(self) -> None:
        """End the communicator; what is still under way has lost its peer."""
        self.posted.clear()  # Nothing more is taken early.
        if self.waiting() is not None:
            self.abort()
        with suppress(RuntimeError):
            self.backend.shutdown()
        self._announced.clear()
        self._arriving.clear()
        self._departing.clear()


def make_backend(kind: str, store: Any, number: int, name: str, timeout: timedelta, ranks: list[int]) -> Any:
    """Make a backend of two ranks of the world, as `torch.distributed.new_group` does, but with nobody else's help.

    That one needs all ranks of the world where the user has bound a device to it (`device_id=`).
    """
    if kind == "gloo":
        return dist.ProcessGroupGloo(store, number, 2, timeout)
    if kind in ("nccl", "xccl"):
        maker: Any = getattr(dist, f"ProcessGroup{kind.upper()}")
        options = maker.Options()
        options._timeout, options.group_name, options.global_ranks_in_group = timeout, name, ranks
        return maker(store, number, 2, options)
    plugin: Any = dist.Backend._plugins[kind.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, number, 2, timeout)
    described = _DistributedBackendOptions()
    described.store, described.group_rank, described.group_size = store, number, 2
    described.timeout, described.group_id, described.global_ranks_in_group = timeout, name, ranks
    return plugin.creator_fn(described, None)
