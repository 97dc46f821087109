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
of that chain rather than to the neighbour, which may be waiting as well.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, NamedTuple

import torch

from penstock.errors import MessageError, PeerFailure, UsageError
from penstock.runtime.transport.base import (
    Channel,
    Transport,
    Where,
    check_channels,
    located,
    lost_source,
    lost_target,
    nowhere,
    with_report,
    wrong_message,
)
from penstock.runtime.transport.failure.compiling import last_compiled
from penstock.runtime.transport.handover import Ready, arrive, share

__all__ = ["ThreadTransport"]


class Message(NamedTuple):
    step: int
    microbatch: int
    value: Any
    ready: Ready | None
    failure: PeerFailure | None


class Link:
    """The shared half of one channel: messages forwards, permits backwards."""

    __slots__ = ("messages", "permits")

    def __init__(self, capacity: int | None) -> None:
        self.messages: SimpleQueue[Message | None] = SimpleQueue()  # None wakes the waiter: see the board
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
        self.clear()

    def clear(self) -> None:
        self.generation += 1
        self.failure: PeerFailure | None = None
        self.news.clear()
        self.opened: dict[int, tuple[tuple[Channel, ...], set[int]]] = {}  # by turn, and the ranks that have yet to
        self.links: dict[tuple[Channel, ...], list[Link]] = {}
        self.waiting: list[int | None] = [None] * self.ranks  # for whom each rank waits
        self.mail: list[list[SimpleQueue[Any]]] = [
            [SimpleQueue() for _ in range(self.ranks)] for _ in range(self.ranks)
        ]

    def open(self, rank: int, turn: int, channels: tuple[Channel, ...]) -> list[Link]:
        """The links of this program; the `turn`-th open of every rank must name the same channels."""
        with self.lock:
            first, others = self.opened.setdefault(turn, (channels, set(range(self.ranks))))
            if first != channels:
                raise UsageError(f"rank {rank} opened other channels than another rank; pass the same list on all")
            others.discard(rank)
            if not others:
                del self.opened[turn]
            if channels not in self.links:
                self.links[channels] = [Link(self.capacity) for _ in channels]
            return self.links[channels]

    def abort(self, failure: PeerFailure) -> PeerFailure:
        """The first failure stays; every waiter is woken."""
        with self.lock:
            if self.failure is None:
                self.failure = failure if failure.report else with_report(failure, self.report())
            for links in self.links.values():
                for link in links:
                    link.messages.put(None)
                    if link.permits is not None:
                        link.permits.put(False)
            for row in self.mail:
                for queue in row:
                    queue.put(None)
            return self.failure

    def report(self) -> list[str]:
        """What each rank is doing now, in words."""
        waits = ["" if peer is None else f", waiting for rank {peer}" for peer in self.waiting]
        return [doing() + wait for doing, wait in zip(self.doing, waits, strict=True)]

    def chain(self, rank: int) -> list[int]:
        """This rank, the rank it waits for, the rank that one waits for, and so on."""
        path = [rank]
        while (following := self.waiting[path[-1]]) is not None:
            path.append(following)
            if following in path[:-1]:
                break
        return path


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
        self._step = 0
        self._turn = 0
        self._channels: tuple[Channel, ...] = ()
        self._links: list[Link] = []
        self._due: list[deque[int]] = []  # per channel: microbatches posted and not yet come
        self._came: list[dict[int, Message]] = []  # per channel: come before they were asked for

    def open(self, channels: Sequence[Channel]) -> None:
        self._check_whole()
        if channels is self._channels or tuple(channels) == self._channels:
            return
        checked = check_channels(channels, self.ranks)
        if any(self._due) or any(self._came):
            raise UsageError("open() while receives are posted; receive or discard them first")
        self._links = self._board.open(self.rank, self._turn, checked)
        self._turn += 1
        self._channels = checked
        self._due = [deque() for _ in checked]
        self._came = [{} for _ in checked]

    def post(self, channel: int, microbatch: int) -> None:
        due = self._due[channel]
        if microbatch in due or microbatch in self._came[channel]:
            raise UsageError(f"{self._channels[channel].receive_action(microbatch)} is posted already")
        due.append(microbatch)
        permits = self._links[channel].permits
        if permits is not None:
            permits.put(True)

    def receive(self, channel: int, microbatch: int) -> Any:
        message = self._take(channel, microbatch)
        if message.failure is not None:
            raise copy(message.failure)
        return arrive(message.value, message.ready, self.device)

    def discard(self, channel: int, microbatch: int) -> PeerFailure | None:
        if self.broken is not None:
            return self.broken
        return self._take(channel, microbatch).failure

    def send(self, channel: int, microbatch: int, value: Any) -> None:
        shared, ready = share(value)
        self._put(channel, Message(self._step, microbatch, shared, ready, None))

    def send_failure(self, channel: int, microbatch: int, failure: PeerFailure) -> None:
        if self.broken is None:
            self._put(channel, Message(self._step, microbatch, None, None, failure))

    def _put(self, channel: int, message: Message) -> None:
        if self._board.failure is not None:
            self._check_whole()
        link = self._links[channel]
        if link.permits is not None:
            edge = self._channels[channel]
            if not self._wait(link.permits, edge.target_rank, edge, message.microbatch):
                self._check_whole()
        link.messages.put(message)

    def _take(self, channel: int, microbatch: int) -> Message:
        """The message that the receive of this microbatch was posted for."""
        due, came = self._due[channel], self._came[channel]
        if microbatch in came:
            return came.pop(microbatch)
        if microbatch not in due:
            self.post(channel, microbatch)
        edge = self._channels[channel]
        messages = self._links[channel].messages
        while True:
            if self._board.failure is not None:
                self._check_whole()
            message = self._wait(messages, edge.source_rank, edge, microbatch)
            if message is None:
                self._check_whole()
            expected = due.popleft()
            if message.microbatch != expected or message.step != self._step:
                self._refuse(edge, expected, message)
            if expected == microbatch:
                return message  # type: ignore[no-any-return]
            came[expected] = message

    def _wait(self, queue: SimpleQueue[Any], peer: int, edge: Channel | None, microbatch: int) -> Any:
        """The next item of the queue, or the blame for there being none."""
        waiting = self._board.waiting
        waiting[self.rank] = peer
        patience = self.timeout
        try:
            while True:
                try:
                    return queue.get(True, patience)
                except Empty:
                    patience = last_compiled() + self.timeout - monotonic()
                    if patience <= 0:
                        raise copy(self._board.abort(self._blame(peer, edge, microbatch))) from None
        finally:
            waiting[self.rank] = None

    def _blame(self, peer: int, edge: Channel | None, microbatch: int) -> PeerFailure:
        path = self._board.chain(self.rank)
        story = " waits for ".join(f"rank {rank}" for rank in path)
        closed = len(set(path)) < len(path)
        cause = f"deadlock for {self.timeout:g} s ({story})" if closed else f"silent for {self.timeout:g} s"
        if len(path) > 2 and not closed:
            failure = PeerFailure(path[-1], f"{cause} ({story})")
        elif edge is None:
            failure = PeerFailure(peer, f"{cause} while rank {self.rank} waited for it")
        else:
            failure = (lost_source if edge.source_rank == peer else lost_target)(edge, microbatch, cause)
        return failure if closed else located(failure, self._board.where[failure.rank]())

    def _refuse(self, edge: Channel, expected: int, message: Message) -> None:
        due = f"step {self._step} microbatch {expected}"
        error: MessageError = wrong_message(edge, due, f"step {message.step} microbatch {message.microbatch}")
        self.abort(PeerFailure(self.rank, f"MessageError: {error}", stage=edge.target_stage, microbatch=expected))
        raise error

    def flush(self) -> None:
        """Nothing to do: what was sent is in the receiver's hands."""

    def exchange(self, value: Any) -> list[Any]:
        self._check_whole()
        for target in range(self.ranks):
            if target != self.rank:
                self._board.mail[target][self.rank].put((self._step, value))
        values = []
        for source in range(self.ranks):
            if source == self.rank:
                values.append(value)
                continue
            item = self._wait(self._board.mail[self.rank][source], source, None, -1)
            if item is None:
                self._check_whole()
            values.append(item[1])
        self._step += 1
        return values

    def report_by(self, doing: Callable[[], str], where: Where = nowhere) -> None:
        self._board.doing[self.rank], self._board.where[self.rank] = doing, where

    def waits_elsewhere(self, peer: int | None, seconds: float) -> None:
        """This rank waits for another by other means than a message: see whether that is still worth it."""
        self._board.waiting[self.rank] = peer
        if peer is not None:
            self._check_whole()
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
