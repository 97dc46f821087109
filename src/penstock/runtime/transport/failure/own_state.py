"""What a rank can say of itself, asked by the thread of its watch while the rank computes or waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TypeVar
from weakref import WeakMethod

from penstock.runtime.transport.base import Where, nowhere
from penstock.runtime.transport.failure.blame import ENDING, State, Waiting

Said = TypeVar("Said")
STEPS = ("", "step", "train_steps", "evaluate", "predict")  # calls whose exchanges end a step
Traffic = Callable[[Waiting | None], tuple[dict[int, int], tuple[int, int] | None]]  # see `State`: sent, and awaits


class OwnState:
    """What one rank does, as its transport can tell it."""

    collects: int | None = None  # Number of the exchange, if this rank waits for the answers of one it has posted.
    connects: str = ""  # What it waits for while it makes a connection.

    def __init__(self, now: Callable[[], float]) -> None:
        self.step = 0  # Counts the exchanges of the group.
        self.doing: Callable[[], str] = lambda: "nothing known"
        self.where: Where = nowhere
        self.call: Callable[[], str] = lambda: ""  # what the user has called, where all ranks must call the same
        self.traffic: Traffic = lambda waiting: ({}, None)
        self._now = now
        self._seen: tuple[int, str, Waiting | None] | None = None  # What the last look saw.
        self._since = now()  # Time at which it was first seen so.

    @property
    def call_step(self) -> int:
        """The exchange that this rank's call makes, by which the calls of ranks can be compared."""
        collects = self.collects
        return self.step if collects is None else collects

    @property
    def reason(self) -> str:
        """In or for what this rank waits where it waits for no message of a channel, in words."""
        call = self.call()
        ends_step = call.partition("(")[0] in STEPS
        return self.connects or (ENDING if ends_step else f"in an exchange of {call}")

    @contextmanager
    def connecting(self, what: str) -> Iterator[None]:
        """Surround a wait for a connection, which is not one in an exchange."""
        before, self.connects = self.connects, what
        try:
            yield
        finally:
            self.connects = before

    def look(self, waiting: Waiting | None) -> None:
        """Note at every beat whether this rank has moved on."""
        found = self.step, self.doing(), waiting
        if found != self._seen:
            self._seen, self._since = found, self._now()

    def state(self, waiting: Waiting | None) -> State:
        """Return all of it, for other ranks."""
        doing = self.doing() + ("" if waiting is None else f", waiting for rank {waiting.peer}")
        unchanged = self._now() - self._since
        return State(waiting, doing, self.where(), self.call_step, self.call(), unchanged, *self.traffic(waiting))


def held_weakly(call: Callable[[], Said], otherwise: Said) -> Callable[[], Said]:
    """Wrap a method so that it does not keep its object alive; once that is gone, the answer is `otherwise`.

    The thread of a watch is alive as long as its transport. If it held the rank that it asks, a pipeline that is
    dropped without `close()` would never be freed.
    """
    if not isinstance(call, MethodType):
        return call
    method = WeakMethod(call)

    def answer() -> Said:
        found = method()
        return otherwise if found is None else found()

    return answer
