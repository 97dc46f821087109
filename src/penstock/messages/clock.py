"""Time, and everything that waits for it: the machine's own, unless somebody passes in another.

Whoever finds out that a rank is silent asks a clock, sleeps, wakes others and runs beside the rank's own work. All of
that comes from one object, so that the same code runs on threads and real time, and in a rehearsal
(`penstock.rehearsal`) on virtual time, where thousands of ranks take turns in one thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar

Given = ParamSpec("Given")
Found = TypeVar("Found")


class Event(Protocol):
    """As `threading.Event`, as far as it is used here."""

    def wait(self, timeout: float, /) -> bool: ...

    def set(self) -> None: ...

    def clear(self) -> None: ...


class Queue(Protocol):
    """As `queue.SimpleQueue`, as far as it is used here."""

    def put(self, item: Any, /) -> None: ...

    def get(self, block: bool = True, timeout: float | None = None, /) -> Any: ...


class Worker(Protocol):
    """As `threading.Thread`, as far as it is used here."""

    def start(self) -> None: ...

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...


class Submitted(Protocol):
    """As `concurrent.futures.Future`, as far as it is used here."""

    def done(self) -> bool: ...

    def exception(self, timeout: float | None = None) -> BaseException | None: ...


class Background(Protocol):
    """As an executor of `concurrent.futures`, as far as it is used here."""

    def submit(self, work: Callable[[], Any], /) -> Submitted: ...

    def shutdown(self) -> None: ...


class Clock:
    """The machine's time and threads."""

    now: Callable[[], float] = staticmethod(time.monotonic)  # seconds since some moment

    def sleep(self, seconds: float) -> None:
        """Let this much time pass."""
        time.sleep(seconds)

    def event(self) -> Event:
        """What one may wait for and another set."""
        return threading.Event()

    def queue(self) -> Queue:
        """What one may wait for and others put items into."""
        return SimpleQueue()

    def worker(self, target: Callable[[], None], name: str) -> Worker:
        """What runs `target` beside everything else, once it is started; it does not keep the process alive."""
        return threading.Thread(target=target, name=name, daemon=True)

    def background(self, name: str) -> Background:
        """What does one piece of work after the other, beside everything else; a program that ends waits for it."""
        return ThreadPoolExecutor(1, thread_name_prefix=name)

    def paced(self, work: Callable[Given, Found]) -> Callable[Given, Found]:
        """Work on files, which takes its own time; in a rehearsal, the time that it is said to take."""
        return work


CLOCK = Clock()
