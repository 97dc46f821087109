"""All ranks are threads of this process.

Two uses: a feature (a notebook, several GPUs of one host) and the transport of every fast
test. A channel is a `queue.SimpleQueue`, which is C and costs under a microsecond; tensors
pass as aliases (see `handover`). Buffering is counted by a second queue that runs backwards and
carries permits: `capacity` of them at the start and one more for each posted receive, so that
at capacity 0 a send ends only once its receive is posted. That is the strictest transport
there is, and the one for which `verify` proves programs.

Ranks of one process can see each other, so failure needs no wire: the group shares a board,
and `abort` writes the failure there and wakes every waiter at once by an item in each queue.
On a timeout the board also says who waits for whom, and the blame goes to the rank at the end
of that chain rather than to the neighbour, which may be waiting as well. Where somebody in the
chain has moved on within the timeout, as in a pipeline that takes longer to fill, nobody is yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import copy
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, NamedTuple, NoReturn

import torch

from penstock.errors import PeerFailure, UsageError
from penstock.runtime.transport.base import Transport, Where, nowhere
from penstock.runtime.transport.channel import (
    Channel,
    ChannelEnds,
    Outgoing,
    QueuedIncoming,
    check_channels,
)
from penstock.runtime.transport.compiling import last_compiled
from penstock.runtime.transport.failure.peer_failures import located, lost_source, lost_target, with_report
from penstock.runtime.transport.handover import Ready, arrive, share

LOOKS_PER_TIMEOUT = 10  # at whether those who are waited for move on
IN_MEMORY = "handed over in memory, without a copy"  # how values travel here


class ThreadMessage(NamedTuple):
    step: int
    microbatch: int
    value: Any
    ready: Ready | None
    failure: PeerFailure | None


class ThreadLink:
    """What the two ends of a channel share: messages forwards, permits backwards."""

    __slots__ = ("messages", "permits")

    def __init__(self, capacity: int | None) -> None:
        self.messages: SimpleQueue[ThreadMessage | None] = SimpleQueue()  # None wakes the waiter: see the board
        self.permits: SimpleQueue[bool] | None = None
        if capacity is not None:
            self.permits = SimpleQueue()
            for _ in range(capacity):
                self.permits.put(True)


class Board:
    """What the ranks of one group share."""

    def __init__(self, ranks: int, capacity: int | None) -> None:
        self.ranks = ranks
        self.capacity = capacity
        self.lock = threading.Lock()
        self.generation = 0
        self.news: list[PeerFailure] = []
        self.doing: list[Callable[[], str]] = [lambda: "nothing known"] * ranks
        self.where: list[Where] = [nowhere] * ranks
        self.places: list[tuple[str, float]] = [("", 0.0)] * ranks  # what each rank was doing, and since when
        self.clear()

    def clear(self) -> None:
        self.generation += 1
        self.failure: PeerFailure | None = None
        self.news.clear()
        self.opened: dict[int, tuple[tuple[Channel, ...], set[int]]] = {}  # by turn, and the ranks that have yet to
        self.wires: dict[tuple[Channel, ...], list[ThreadLink]] = {}
        self.waiting: list[int | None] = [None] * self.ranks  # for whom each rank waits
        self.mail: list[list[SimpleQueue[Any]]] = [
            [SimpleQueue() for _ in range(self.ranks)] for _ in range(self.ranks)
        ]

    def open(self, rank: int, turn: int, channels: tuple[Channel, ...]) -> list[ThreadLink]:
        """The wires of this program; the `turn`-th open of every rank must name the same channels."""
        with self.lock:
            first, others = self.opened.setdefault(turn, (channels, set(range(self.ranks))))
            if first != channels:
                raise UsageError(f"rank {rank} opened other channels than another rank; pass the same list on all")
            others.discard(rank)
            if not others:
                del self.opened[turn]
            if channels not in self.wires:
                self.wires[channels] = [ThreadLink(self.capacity) for _ in channels]
            return self.wires[channels]

    def abort(self, failure: PeerFailure) -> PeerFailure:
        """The first failure stays; every waiter is woken."""
        with self.lock:
            if self.failure is None:
                self.failure = failure if failure.report else with_report(failure, self.report())
            for wires in self.wires.values():
                for wire in wires:
                    wire.messages.put(None)
                    if wire.permits is not None:
                        wire.permits.put(False)
            for row in self.mail:
                for queue in row:
                    queue.put(None)
            return self.failure

    def report(self) -> list[str]:
        """What each rank is doing now, in words."""
        waits = ["" if peer is None else f", waiting for rank {peer}" for peer in self.waiting]
        return [doing() + wait for doing, wait in zip(self.doing, waits, strict=True)]

    def still(self, rank: int) -> float:
        """How long everybody for whom this rank waits, one through the other, has been seen doing the same."""
        now = monotonic()
        others = set(self.chain(rank)[1:])
        for other in others:
            doing = f"{self.doing[other]()}, waiting for {self.waiting[other]}"
            if doing != self.places[other][0]:
                self.places[other] = doing, now
        return min((now - self.places[other][1] for other in others), default=now)

    def chain(self, rank: int) -> list[int]:
        """This rank, the rank it waits for, the rank that one waits for, and so on."""
        path = [rank]
        while (following := self.waiting[path[-1]]) is not None:
            path.append(following)
            if following in path[:-1]:
                break
        return path


class ThreadIncoming(QueuedIncoming[ThreadMessage]):
    """The receiving end of a channel between threads."""

    def __init__(self, channel: Channel, wire: ThreadLink, transport: ThreadTransport) -> None:
        super().__init__(channel)
        self._wire = wire
        self._transport = transport

    def _post(self, microbatch: int) -> None:
        self.due.append(microbatch)
        if self._wire.permits is not None:
            self._wire.permits.put(True)

    def receive(self, microbatch: int) -> Any:
        message = self._take(microbatch)
        if message.failure is not None:
            raise copy(message.failure)
        return arrive(message.value, message.ready, self._transport.device)

    def discard(self, microbatch: int) -> PeerFailure | None:
        return self._take(microbatch).failure

    def _next(self, expected: int, ordinal: int, wanted: int) -> ThreadMessage:
        message: ThreadMessage = self._transport.wait_for(self._wire.messages, self.channel.source_rank, self.channel, wanted)
        if message.microbatch != expected or message.step != self._transport.step:
            due, came = f"step {self._transport.step} microbatch {expected}", f"step {message.step} microbatch {message.microbatch}"
            self._refuse(self._transport.abort, expected, due, came)
        return message


class ThreadOutgoing(Outgoing):
    """The sending end of a channel between threads."""

    def __init__(self, channel: Channel, wire: ThreadLink, transport: ThreadTransport) -> None:
        super().__init__(channel)
        self._wire = wire
        self._transport = transport

    def _send(self, microbatch: int, value: Any) -> None:
        shared, ready = share(value)
        self._put(ThreadMessage(self._transport.step, microbatch, shared, ready, None))

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

    def __init__(self, board: Board, rank: int, timeout: float, device: torch.device | None) -> None:
        self.rank = rank
        self.ranks = board.ranks
        self.timeout = timeout
        self.device = device
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
        """One transport for each rank. `devices` moves what a rank receives to its own device."""
        if ranks < 1:
            raise UsageError(f"ranks={ranks}; a group needs at least 1")
        if capacity is not None and capacity < 0:
            raise UsageError(f"capacity={capacity}; pass None (unbounded), 0 (nothing buffered) or a count")
        if devices is not None and len(devices) != ranks:
            raise UsageError(f"{len(devices)} devices for {ranks} ranks; pass one for each rank")
        board = Board(ranks, capacity)
        homes = [None if device is None else torch.device(device) for device in devices or [None] * ranks]
        return [cls(board, rank, timeout, homes[rank]) for rank in range(ranks)]

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
        self._check_not_broken()
        if channels is self.ends.channels or tuple(channels) == self.ends.channels:
            return
        checked = check_channels(channels, self.ranks)
        self.ends.check_idle("open()")
        wires = self._board.open(self.rank, self._turn, checked)
        self._turn += 1
        self.ends = ChannelEnds.of(
            checked,
            self.rank,
            lambda number, channel: ThreadIncoming(channel, wires[number], self),
            lambda number, channel: ThreadOutgoing(channel, wires[number], self),
        )

    def describe_link(self, source: int, target: int) -> str:
        return IN_MEMORY

    def check_not_broken(self) -> None:
        """Raise the loss that has broken the group, if one has."""
        if self._board.failure is not None:
            self._check_not_broken()

    def wait_for(self, queue: SimpleQueue[Any], peer: int, channel: Channel | None, microbatch: int) -> Any:
        """The next item of the queue, or the blame for there being none; `None` or `False` wake whoever waits."""
        self.check_not_broken()
        waiting = self._board.waiting
        waiting[self.rank] = peer
        look = self.timeout / LOOKS_PER_TIMEOUT
        begin = monotonic()
        try:
            while True:
                try:
                    item = queue.get(True, look)
                    break
                except Empty:
                    still = self._board.still(self.rank)
                    waited = monotonic() - max(begin, last_compiled())
                    if waited >= self.timeout and still >= self.timeout - 2 * look:
                        raise copy(self._board.abort(self._blame(peer, channel, microbatch))) from None
        finally:
            waiting[self.rank] = None
        if not item:
            self._check_not_broken()
        return item

    def _blame(self, peer: int, channel: Channel | None, microbatch: int) -> PeerFailure:
        path = self._board.chain(self.rank)
        story = " waits for ".join(f"rank {rank}" for rank in path)
        closed = len(set(path)) < len(path)
        cause = f"deadlock for {self.timeout:g} s ({story})" if closed else f"silent for {self.timeout:g} s"
        if len(path) > 2 and not closed:
            failure = PeerFailure(path[-1], f"{cause} ({story})")
        elif channel is None:
            failure = PeerFailure(peer, f"{cause} while rank {self.rank} waited for it")
        else:
            failure = (lost_source if channel.source_rank == peer else lost_target)(channel, microbatch, cause)
        return failure if closed else located(failure, self._board.where[failure.rank]())

    def flush(self) -> None:
        """Nothing to do: what was sent is in the receiver's hands."""

    def exchange(self, value: Any) -> list[Any]:
        self._check_not_broken()
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
        """This rank waits for another by other means than a message: see whether that is still worth it."""
        self._board.waiting[self.rank] = peer
        if peer is not None:
            self._check_not_broken()
            if min(seconds, monotonic() - last_compiled()) > self.timeout:
                raise copy(self._board.abort(self._blame(peer, None, -1)))

    def announce(self, failure: PeerFailure) -> None:
        if self.ranks > 1:
            self._board.news.append(failure)

    def abort(self, failure: PeerFailure) -> None:
        self._board.abort(failure)

    def reset(self) -> None:
        """Also heals a broken group: threads have no link that could have been lost.

        The board is shared: the first rank to reset clears it, the others join the new generation.
        """
        with self._board.lock:
            if self._generation == self._board.generation:
                self._board.clear()
        self._clear()

    def close(self) -> None:
        self._clear()
