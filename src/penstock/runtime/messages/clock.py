"""Time, and everything that waits for it: the machine's own, unless somebody passes in another.

Whoever finds out that a rank is silent asks a clock, sleeps, wakes others and runs beside the rank's own work. All of
that comes from one object, so that the same code runs on threads and real time, and in a rehearsal on virtual time,
where thousands of ranks take turns in one thread.

Threads here are daemons, because one that is stuck (in a store that does not answer, say) must not keep the process
alive. But a daemon that comes back from C++ while the interpreter shuts down aborts the process ("terminate called
without an active exception"). So a program that ends waits for those that have been told to stop.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Found = TypeVar("Found")

EXIT_SECONDS = 6.0  # A program that ends waits this long for threads that were asked to stop.
_THREADS: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Clock:
    """The machine's time and threads.

    What others put in the place of an event, a queue, a worker and a background may do as little as is used of
    `threading.Event`, `queue.SimpleQueue`, `threading.Thread` and an executor of `concurrent.futures`.
    """

    now: Callable[[], float] = staticmethod(time.monotonic)  # seconds since some moment

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def event(self) -> Any:
        return threading.Event()

    def queue(self) -> Any:
        return SimpleQueue()

    def worker(self, target: Callable[[], None], name: str) -> Any:
        """Make a worker that runs `target` beside everything else, once started; it does not keep the process alive."""
        return daemon(target, name)

    def background(self, name: str) -> Any:
        """Make a worker that does one piece of work after the other; a program that ends waits for it."""
        return ThreadPoolExecutor(1, thread_name_prefix=name)

    def paced(self, work: Callable[Given, Found]) -> Callable[Given, Found]:
        """Work on files, which takes its own time; in a rehearsal, the time that it is said to take."""
        return work


def daemon(target: Callable[[], None], name: str) -> threading.Thread:
    """Make a thread that does not keep the process alive, but that a program which ends waits for.

    Whoever makes it asks it to stop, at the latest in a finalizer.
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
