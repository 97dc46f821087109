"""All ranks are threads of this process.

Two uses: a feature (a notebook, several GPUs of one host) and the transport of every fast test. A channel is a
`queue.SimpleQueue`, which is C and costs under a microsecond; tensors pass as aliases (see `handover`). Buffering is
counted by a second queue that runs backwards and carries permits: `capacity` of them at the start and one more for
each posted receive, so that at capacity 0 a send ends only once its receive is posted. That is the strictest transport
there is, and the one for which `verify` proves programs.

Ranks of one process can see each other, so failure needs no wire: the group shares a board, and `abort` writes the
failure there and wakes every waiter at once by an item in each queue. On a timeout the board also says who waits for
whom, and who is to blame follows from that as it does between processes (`failure/blame`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import copy
from itertools import chain
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, NamedTuple

import torch

from penstock.devices import on_accelerator
from penstock.errors import PeerFailure, UsageError
from penstock.runtime.transport.base import Transport, Where, nowhere
from penstock.runtime.transport.channel import Channel, ChannelEnds, Outgoing, QueuedIncoming, check_channels
from penstock.runtime.transport.failure.blame import Excused, State, Waiting, judge
from penstock.runtime.transport.failure.peer_failures import after_loss, with_report
from penstock.runtime.transport.failure.silence import COMPILATIONS
from penstock.runtime.transport.handover import Ready, arrive, share
from penstock.runtime.transport.interrupts import uninterrupted

LOOKS_PER_TIMEOUT = 10  # Looks at whether those who are waited for move on.
IN_MEMORY = "handed over in memory, without a copy"  # how values travel here


class ThreadMessage(NamedTuple):
    step: int
    microbatch: int
    value: Any
    ready: Ready | None
    failure: PeerFailure | None


class ThreadLink(NamedTuple):
    """What the two ends of a channel share: messages forwards, permits backwards, where there is a capacity."""

    messages: SimpleQueue[ThreadMessage | None]  # None wakes the waiter: see the board
    permits: SimpleQueue[bool] | None

    @classmethod
    def of(cls, capacity: int | None) -> ThreadLink:
        permits: SimpleQueue[bool] | None = None
        if capacity is not None:
            permits = SimpleQueue()
            for _ in range(capacity):
                permits.put(True)
        return cls(SimpleQueue(), permits)


class Board:
    """What the ranks of one group share."""

    def __init__(self, ranks: int, capacity: int | None) -> None:
        self.ranks, self.capacity = ranks, capacity
        self.lock = threading.Lock()
        self.generation = 0
        self.news: list[PeerFailure] = []
        self.doing: list[Callable[[], str]] = [lambda: "nothing known"] * ranks
        self.where: list[Where] = [nowhere] * ranks
        self.seen: list[tuple[Any, float]] = [(None, 0.0)] * ranks  # what each rank was seen doing, and since when
        self.clear()

    def clear(self) -> None:
        self.generation += 1
        self.failure: PeerFailure | None = None
        self.news.clear()
        # By turn, the channels and the ranks that have yet to open them.
        self.opened: dict[int, tuple[tuple[Channel, ...], set[int]]] = {}
        self.wires: dict[tuple[Channel, ...], list[ThreadLink]] = {}
        self.waiting: list[Waiting | None] = [None] * self.ranks
        self.mail: list[list[SimpleQueue[Any]]] = [[SimpleQueue() for _ in self.waiting] for _ in self.waiting]

    def open(self, rank: int, turn: int, channels: tuple[Channel, ...]) -> list[ThreadLink]:
        """Return the wires of this program; the `turn`-th open of every rank must name the same channels."""
        with self.lock:
            first, others = self.opened.setdefault(turn, (channels, set(range(self.ranks))))
            if first != channels:
                raise UsageError(f"rank {rank} opened other channels than another rank; pass the same list on all")
            others.discard(rank)
            if not others:
                del self.opened[turn]
            if channels not in self.wires:
                self.wires[channels] = [ThreadLink.of(self.capacity) for _ in channels]
            return self.wires[channels]

    def abort(self, failure: PeerFailure) -> PeerFailure:
        """Wake every waiter with the first failure, which stays."""
        with self.lock:
            if self.failure is None:
                doing = [state.doing for state in self.states().values()]
                self.failure = failure if failure.report else with_report(failure, doing)
            for wire in chain.from_iterable(self.wires.values()):
                wire.messages.put(None)
                if wire.permits is not None:
                    wire.permits.put(False)
            for queue in chain.from_iterable(self.mail):
                queue.put(None)
            return self.failure

    def states(self) -> dict[int, State]:
        """Return what each rank is doing now, and for how long it has been seen doing that."""
        now, found = monotonic(), {}
        for rank, waiting in enumerate(self.waiting):
            doing = self.doing[rank]() + ("" if waiting is None else f", waiting for rank {waiting.peer}")
            if doing != self.seen[rank][0]:
                self.seen[rank] = doing, now
            unchanged = now - self.seen[rank][1]
            found[rank] = State(waiting, doing, self.where[rank](), seconds_unchanged=unchanged)
        return found


class ThreadIncoming(QueuedIncoming[ThreadMessage]):
    """The receiving end of a channel between threads."""

    def __init__(self, channel: Channel, wire: ThreadLink, transport: ThreadTransport) -> None:
        super().__init__(channel)
        self._wire, self._transport = wire, transport
        self._from_cpu = not on_accelerator(transport.homes[channel.source_rank])

    @uninterrupted
    def post(self, microbatch: int) -> None:
        if microbatch in self.posted:
            raise self._posted_already(microbatch)
        self.due.append(microbatch)
        if self._wire.permits is not None:
            self._wire.permits.put(True)
        self.posted[microbatch] = None
        self.count += 1

    def receive(self, microbatch: int) -> Any:
        message = self._take(microbatch)
        if message.failure is not None:
            raise copy(message.failure)
        return arrive(message.value, message.ready, self._transport.device, from_cpu=self._from_cpu)

    def discard(self, microbatch: int) -> PeerFailure | None:
        return self._take(microbatch).failure

    def _next(self, expected: int, ordinal: int, wanted: int) -> ThreadMessage:
        queue, peer = self._wire.messages, self.channel.source_rank
        message: ThreadMessage = self._transport.wait_for(queue, peer, self.channel, wanted)
        if message.microbatch != expected or message.step != self._transport.step:
            due = f"step {self._transport.step} microbatch {expected}"
            came = f"step {message.step} microbatch {message.microbatch}"
            self._refuse(self._transport.abort, expected, due, came)
        return message


class ThreadOutgoing(Outgoing):
    """The sending end of a channel between threads."""

    def __init__(self, channel: Channel, wire: ThreadLink, transport: ThreadTransport) -> None:
        super().__init__(channel)
        self._wire, self._transport = wire, transport

    @uninterrupted
    def send(self, microbatch: int) -> None:
        if microbatch not in self.ready:
            raise self._not_ready(microbatch)
        shared, ready = share(self.ready[microbatch])
        self._put(ThreadMessage(self._transport.step, microbatch, shared, ready, None))
        del self.ready[microbatch]
        self.count += 1

    def _send_failure(self, microbatch: int, failure: PeerFailure) -> None:
        self._put(ThreadMessage(self._transport.step, microbatch, None, None, failure))

    def _put(self, message: ThreadMessage) -> None:
        if self._wire.permits is None:
            self._transport.check_not_broken()
        else:
            self._transport.wait_for(self._wire.permits, self.channel.target_rank, self.channel, message.microbatch)
        self._wire.messages.put(message)


class ThreadTransport(Transport):
    """One rank's end. Made by `group`."""

    def __init__(self, board: Board, rank: int, timeout: float, homes: Sequence[torch.device | None]) -> None:
        self.rank, self.ranks = rank, board.ranks
        self.timeout, self.device, self.homes = timeout, homes[rank], homes
        self._board = board
        self._clear()

    @classmethod
    def group(
        cls,
        ranks: int,
        capacity: int | None = None,
        timeout: float = 60.0,
        devices: Sequence[torch.device | str | None] | None = None,
    ) -> list[ThreadTransport]:
        """Make one transport for each rank. `devices` moves what a rank receives to its own device."""
        if ranks < 1:
            raise UsageError(f"ranks={ranks}; a group needs at least 1")
        if capacity is not None and capacity < 0:
            raise UsageError(f"capacity={capacity}; pass None (unbounded), 0 (nothing buffered) or a count")
        if devices is not None and len(devices) != ranks:
            raise UsageError(f"{len(devices)} devices for {ranks} ranks; pass one for each rank")
        board = Board(ranks, capacity)
        homes = [None if device is None else torch.device(device) for device in devices or [None] * ranks]
        return [cls(board, rank, timeout, homes) for rank in range(ranks)]

    @property
    def broken(self) -> PeerFailure | None:
        return self._board.failure

    @property
    def news(self) -> list[PeerFailure]:  # type: ignore[override]
        return self._board.news

    def _clear(self) -> None:
        self._generation = self._board.generation
        self.step = 0
        self._turn = 0
        self.ends = ChannelEnds((), self.rank)

    def open(self, channels: Sequence[Channel]) -> None:
        self.check_not_broken()
        if channels is self.ends.channels or tuple(channels) == self.ends.channels:
            return
        checked = check_channels(channels, self.ranks)
        self.ends.check_idle("open()")
        wires = self._board.open(self.rank, self._turn, checked)
        self._turn += 1
        self.ends = ChannelEnds(
            checked,
            self.rank,
            lambda number, channel: ThreadIncoming(channel, wires[number], self),
            lambda number, channel: ThreadOutgoing(channel, wires[number], self),
        )

    def describe_link(self, source: int, target: int) -> str:
        return IN_MEMORY

    def wait_for(self, queue: SimpleQueue[Any], peer: int, channel: Channel | None, microbatch: int) -> Any:
        """Return the next item of the queue, or whom to blame for its lack; `None` or `False` wake whoever waits."""
        if self._board.failure is not None:
            raise after_loss(self._board.failure)
        waits = self._board.waiting
        waits[self.rank] = waiting = Waiting(peer, channel, microbatch, monotonic())
        try:
            while True:
                try:
                    item = queue.get(True, self.timeout / LOOKS_PER_TIMEOUT)
                    break
                except Empty:
                    found = self._judge(waiting)
                    waited = monotonic() - max(waiting.since, COMPILATIONS.last())
                    if waited >= self.timeout and isinstance(found, PeerFailure):
                        raise copy(self._board.abort(found)) from None
        finally:
            waits[self.rank] = None
        if not item:
            self.check_not_broken()
        return item

    def _judge(self, waiting: Waiting) -> PeerFailure | Excused:
        """Return who is to blame for this wait, if everybody in the chain of waits has stood still for the timeout."""
        return judge(self.rank, waiting, self._board.states(), self.timeout, self.timeout / LOOKS_PER_TIMEOUT)

    def flush(self) -> None:
        """Do nothing: what was sent is in the receiver's hands."""

    def exchange(self, value: Any) -> list[Any]:
        self.check_not_broken()
        for target in range(self.ranks):
            if target != self.rank:
                self._board.mail[target][self.rank].put((value,))
        values = []
        for source in range(self.ranks):
            if source == self.rank:
                values.append(value)
                continue
            values.append(self.wait_for(self._board.mail[self.rank][source], source, None, -1)[0])
        self.step += 1
        self.ends.end_step()
        return values

    def describe_by(self, doing: Callable[[], str], where: Where = nowhere) -> None:
        self._board.doing[self.rank], self._board.where[self.rank] = doing, where

    def waits_elsewhere(self, peer: int | None, seconds: float) -> None:
        """Check whether waiting for another rank by other means than a message is still worth it."""
        if peer is None:
            self._board.waiting[self.rank] = None
            return
        waiting = self._board.waiting[self.rank] = Waiting(peer, None, -1, monotonic() - seconds, "for it")
        self.check_not_broken()
        found = self._judge(waiting)
        if min(seconds, monotonic() - COMPILATIONS.last()) > self.timeout and isinstance(found, PeerFailure):
            raise copy(self._board.abort(found))

    def announce(self, failure: PeerFailure) -> None:
        if self.ranks > 1:
            self._board.news.append(failure)

    def abort(self, failure: PeerFailure) -> None:
        self._board.abort(failure)

    def reset(self) -> None:
        """Reset the group, also a broken one: the first rank clears the board, the others join the new generation."""
        with self._board.lock:
            if self._generation == self._board.generation:
                self._board.clear()
        self._clear()

    def close(self) -> None:
        self._clear()
