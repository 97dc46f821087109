"""Time, and everything that waits for it: the machine's own, unless somebody passes in another.

Whoever finds out that a rank is silent asks a clock, sleeps, wakes others and runs beside the rank's own work. All of
that comes from one object, so that the same code runs on threads and real time, and in a rehearsal
(`penstock.rehearsal`) on virtual time, where thousands of ranks take turns in one thread.

Threads here are daemons, because one that is stuck (a store that does not answer, a model that never returns) must not
keep the process alive. But Python ends a daemon that comes back from C++ while the interpreter shuts down, and that
aborts the process ("terminate called without an active exception"). So a program that ends waits for those that have
been told to stop, for at most `EXIT_SECONDS`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar

Given = ParamSpec("Given")
Found = TypeVar("Found")

# A program that ends waits this long for threads that were asked to stop.
EXIT_SECONDS = 6.0
_THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


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
        """Make an event, which one may wait for and another set."""
        return threading.Event()

    def queue(self) -> Queue:
        """Make a queue, which one may wait for and others put items into."""
        return SimpleQueue()

    def worker(self, target: Callable[[], None], name: str) -> Worker:
        """Make a worker that runs `target` beside everything else, once started; it does not keep the process alive."""
        return daemon(target, name)

    def background(self, name: str) -> Background:
        """Make a worker that does one piece of work after the other; a program that ends waits for it."""
        return ThreadPoolExecutor(1, thread_name_prefix=name)

    def paced(self, work: Callable[Given, Found]) -> Callable[Given, Found]:
        """Work on files, which takes its own time; in a rehearsal, the time that it is said to take."""
        return work


def daemon(target: Callable[[], None], name: str) -> threading.Thread:
    """Make a thread that does not keep the process alive. Whoever makes it asks it to stop, at the latest in a
    finalizer: a program that ends waits for it.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    _THREADS.add(thread)
    return thread


def _join_daemons() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in [each for each in _THREADS if each.is_alive()]:
        thread.join(max(0.0, deadline - time.monotonic()))


CLOCK = Clock()
# At exit finalizers run in reverse order: this one after all that ask threads to stop.
weakref.finalize(CLOCK, _join_daemons)
