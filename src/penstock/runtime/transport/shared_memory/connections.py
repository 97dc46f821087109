"""All connections of one rank, and waiting on them.

Whoever waits for one rank still reads what all others send, every few milliseconds: a packet that lies unread
would in the end fill its socket and hold up a sender, and so make a program wait for more than its proof says.
That is also when a death is seen of a rank that nobody waits for yet.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from copy import copy
from time import monotonic
from typing import NoReturn

from penstock.errors import PeerFailure
from penstock.runtime.transport.base import Channel, after_loss
from penstock.runtime.transport.failure.blame import Waiting
from penstock.runtime.transport.failure.interrupts import CTRL_C
from penstock.runtime.transport.failure.watch import Watch
from penstock.runtime.transport.shared_memory.connection import SLICE_SECONDS, Gone, Pair

__all__ = ["Pairs"]

# Most answers come within this; to sleep and be woken costs about as much. Others run meanwhile: each look yields.
SPIN_SECONDS = 100e-6
CLOSED = "died or left (its connection closed)"


class Pairs(dict[int, Pair]):
    """By peer. `busy_with` is the channel and microbatch that this rank is sending or posting."""

    def __init__(self, rank: int, watch: Watch) -> None:
        super().__init__()
        self.busy_with: tuple[Channel | None, int] = (None, -1)
        self._rank = rank
        self._watch = watch

    def wait(self, pair: Pair, edge: Channel | None, microbatch: int, done: Callable[[], object]) -> None:
        """Read what `pair` sends until it is done; the watch sees for whom, and ends the wait if that is hopeless."""
        watch = self._watch
        watch.waiting = waiting = Waiting(pair.peer, edge, microbatch, monotonic())
        awake = waiting.since + SPIN_SECONDS
        try:
            while not done():
                if watch.verdict is not None:
                    raise after_loss(watch.verdict)
                if CTRL_C.since:
                    CTRL_C.look()
                if monotonic() < awake:
                    if not pair.read(False):
                        os.sched_yield()
                elif not pair.read(True):
                    self._look_around()
        except Gone:
            self.lose(waiting)
        finally:
            watch.waiting = None

    def wait_for_room(self, pair: Pair) -> None:
        """The socket is full, its reader is behind: read meanwhile what others, perhaps waiting alike, have sent."""
        watch = self._watch
        watch.waiting = Waiting(pair.peer, *self.busy_with, monotonic())
        try:
            self._look_around()
            while not select.select([], [pair], [], SLICE_SECONDS)[1]:
                if watch.verdict is not None:
                    raise after_loss(watch.verdict)
                self._look_around()
        finally:
            watch.waiting = None

    def _look_around(self) -> None:
        for pair in self.values():
            try:
                while not pair.gone and pair.read(False):
                    pass
            except Gone:
                if not pair.left:
                    lost = PeerFailure(pair.peer, f"{CLOSED}, seen by rank {self._rank}")
                    raise copy(self._watch.settle(lost)) from None

    def lose(self, waiting: Waiting) -> NoReturn:
        """The group's verdict on a connection that is closed."""
        self._watch.waiting = None
        raise copy(self._watch.settle(waiting.blame(self._rank, CLOSED))) from None

    def close(self) -> None:
        for pair in self.values():
            pair.close()
        self.clear()
