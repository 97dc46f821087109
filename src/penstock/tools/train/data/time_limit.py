"""A limit for what may loop for ever and is written by somebody else, such as a chat template."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.errors import UsageError

FEW = 1000  # steps of a loop, in each of which Python looks whether something was raised
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc


class _TimeUp(BaseException):
    """Raised inside of what takes too long."""


@contextmanager
def time_limit(seconds: float, what: Callable[[], str]) -> Iterator[None]:
    """Raise UsageError where what is inside, in whichever thread, has not ended within so many seconds.

    In the main thread, seconds are those that the process computes, and arithmetic of large numbers is interrupted as
    well. In other threads it must be Python that runs: what C does is not interrupted.
    """
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with _by_signal(seconds) if is_main else _by_thread(seconds):
            yield
    except _TimeUp:
        raise UsageError(f"{what()} has not come to an end within {seconds:g} s") from None


@contextmanager
def _by_signal(seconds: float) -> Iterator[None]:
    def end(*_: object) -> None:
        raise _TimeUp

    before = signal.signal(signal.SIGVTALRM, end)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)


@contextmanager
def _by_thread(seconds: float) -> Iterator[None]:
    thread, lock = ctypes.c_ulong(threading.get_ident()), threading.Lock()
    inside, is_late = True, False

    def end() -> None:
        nonlocal is_late
        with lock:
            if inside:
                is_late = True
                _raise_in(thread, ctypes.py_object(_TimeUp))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            inside = False
        # What was raised a moment ago comes here. Taking it back instead would leave Python's mark that something
        # is to come, for which Python 3.11 waits for ever under a profiler.
        for _ in range(FEW if is_late else 0):
            pass
