"""The links between ranks on virtual time, and the store that all of them reach.

A message occupies its link for a while (messages of one ordered pair of ranks queue for it) and is there some time
later. Messages of one wire come in their order. When a process dies, what it has sent still comes, and then its peers
see that the connection has closed, if they wait for that very process: as with gloo. Of a process that stands still
nothing is seen.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from penstock.runtime.transport.interrupts import CTRL_C, DUE
from penstock.tools.rehearsal.virtual_time import Task, VirtualTime

CLOSED = "Connection closed by peer"
TIMED_OUT = "Timed out waiting for a message"
STORE_LATENCY = 1e-4  # seconds to the store and back
STORE_SERVICE = 1e-5  # seconds that the store, which is one thread, needs for a key


class Parcel(NamedTuple):
    """A message, how long it occupies its link, how long after that it is there, and what a fault makes of it."""

    message: Any
    occupied: float
    delay: float
    fate: str = ""  # One of "", "lose", "duplicate" and "reorder".


class Wire:
    """Messages from one rank to another, one after the other. To a transport it is the work that it waits for."""

    __slots__ = ("_last", "_network", "_waiting", "held", "messages", "source", "target")

    def __init__(self, network: Network, source: int, target: int) -> None:
        self._network = network
        self.source, self.target = source, target
        self.messages: deque[tuple[float, Any]] = deque()  # (when it is there, message)
        self.held: Any = None  # a message that the next one overtakes
        self._last = -math.inf
        self._waiting: Task | None = None

    def put(self, parcel: Parcel) -> None:
        """Send a message."""
        network = self._network
        time = network.time
        arrival = time.now
        if parcel.occupied:
            way = self.source, self.target
            arrival = network.free_at[way] = max(arrival, network.free_at[way]) + parcel.occupied
        self._last = arrival = max(arrival + parcel.delay, self._last)
        if parcel.fate == "lose":
            return
        if parcel.fate == "reorder" and self.held is None:
            self.held = parcel.message
            return
        self.messages.append((arrival, parcel.message))
        if parcel.fate == "duplicate":
            self.messages.append((arrival, parcel.message))
        if self.held is not None:
            self.messages.append((arrival, self.held))
            self.held = None
        if self._waiting is not None:
            time.wake(self._waiting, arrival)

    @property
    def is_ready(self) -> bool:
        """Whether a message is there."""
        return bool(self.messages) and self.messages[0][0] <= self._network.time.now

    def wait(self, limit: timedelta) -> None:
        """Wait for a message; raise a RuntimeError, as gloo does, where none will come or none came in time."""
        messages, time = self.messages, self._network.time
        if messages and messages[0][0] <= time.now:
            return
        until = time.now + limit.total_seconds()
        time.limit(until)
        self._waiting = time.current
        try:
            while not (messages and messages[0][0] <= time.now):
                closed = self._closed_at()
                if closed <= time.now:
                    raise RuntimeError(CLOSED)
                if until <= time.now:
                    self._network.close(self.target)
                    raise RuntimeError(TIMED_OUT)
                if CTRL_C.state is DUE and self._network.interruptible:
                    CTRL_C.raise_due()
                time.wait(min(messages[0][0] if messages else math.inf, closed))
        finally:
            self._waiting = None
            time.limit(math.inf)

    def take(self) -> Any:
        """Return the message that has arrived."""
        return self.messages.popleft()[1]

    def _closed_at(self) -> float:
        """Return when the receiver sees that no more will come, as far as that is known."""
        closed = self._network.closed
        own = closed.get(self.target, math.inf)
        if self.messages or self.source not in closed:
            return own
        return min(own, max(closed[self.source] + self._network.latency(self.source, self.target), self._last))

    def tell_closed(self) -> None:
        """Notify whoever waits, once it can see that one of the ends has closed."""
        if self._waiting is not None:
            self._network.time.wake(self._waiting, max(self._network.time.now, self._closed_at()))


class Network:
    """All wires between all ranks."""

    def __init__(self, time: VirtualTime, latency: Callable[[int, int], float]) -> None:
        self.time = time
        self.latency = latency  # Seconds that a message without size takes from one rank to another.
        self.free_at: defaultdict[tuple[int, int], float] = defaultdict(lambda: -math.inf)
        self.interruptible = False  # whether Ctrl-C may end a wait, as with shared memory
        self.closed: dict[int, float] = {}  # Times at which the connections of a rank closed, by rank.
        self.read_before: dict[bytes, Any] = {}  # what ranks say in exchanges, and what that means
        self._wires: dict[tuple[int, int, int], Wire] = {}
        self._by_rank: defaultdict[int, list[Wire]] = defaultdict(list)

    def wire(self, source: int, target: int, tag: int) -> Wire:
        """Return the wire of this tag between the two."""
        wire = self._wires.get((source, target, tag))
        if wire is None:
            wire = self._wires[source, target, tag] = Wire(self, source, target)
            self._by_rank[source].append(wire)
            self._by_rank[target].append(wire)
        return wire

    def close(self, rank: int) -> None:
        """Close all connections of the rank, whose process dies or leaves."""
        if rank not in self.closed:
            self.closed[rank] = self.time.now
            for wire in self._by_rank[rank]:
                wire.tell_closed()

    def sees_closed(self, rank: int, peer: int) -> bool:
        """Return whether the rank can no longer send to the peer, and knows it."""
        now = self.time.now
        return self.closed.get(rank, math.inf) <= now or (
            peer in self.closed and self.closed[peer] + self.latency(peer, rank) <= now
        )


class Backend:
    """What gloo is to a rank, on virtual time: sends, receives, and connections that close."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank

    def send(self, content: Sequence[Parcel], peer: int, tag: int) -> None:
        """Send a message; nobody has to wait for that."""
        if self._network.closed and self._network.sees_closed(self._rank, peer):
            raise RuntimeError(CLOSED)
        self._network.wire(self._rank, peer, tag).put(content[0])

    def recv(self, content: Sequence[Any], peer: int, tag: int) -> Wire:
        """Return what to wait for; whoever waits takes the message off the wire then."""
        if self._network.closed.get(self._rank, math.inf) <= self._network.time.now:
            raise RuntimeError(CLOSED)
        return self._network.wire(peer, self._rank, tag)


class Store:
    """The process group's store. It answers one question at a time; `host` is the rank whose process it is, if any."""

    def __init__(self, network: Network, host: int | None) -> None:
        self._network, self.host = network, host
        self._values: dict[str, bytes] = {}
        self._free_at = -math.inf
        self.requests = 0

    def check(self, keys: Sequence[str]) -> bool:
        self._serve(len(keys))
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        self._serve(1)
        return self._values[key]

    def set(self, key: str, value: str) -> None:
        self._serve(1)
        self._values[key] = value.encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._serve(1)
        if self._values.get(key, b"").decode() == expected:
            self._values[key] = desired.encode()
        return self._values.get(key, b"")

    def _serve(self, keys: int) -> None:
        time, host = self._network.time, self.host
        self.requests += 1
        self._free_at = max(self._free_at, time.now) + keys * STORE_SERVICE
        time.sleep(self._free_at + STORE_LATENCY - time.now)
        while host is not None and (host in self._network.closed or time.is_stopped(host)):
            if host in self._network.closed:
                raise RuntimeError("the store has gone with its host")
            time.sleep(0.1)
