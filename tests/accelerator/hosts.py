"""Threads of the host that know only what they have heard of.

By default what one thread of the host has waited for is known to all, which hides a race whose threads were in the
right order by luck. Inside `apart()` a thread knows what it has waited for itself, and what threads knew whose lock it
then took, that started it, or that it joined. Locks made before are not seen, nor are those of C: make the pipeline
inside.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

from accelerator.pretend import native


class _Lock:
    """A lock that hands over what its last holder knew."""

    def __init__(self, real: Any) -> None:
        self._real = real
        for name in ("_is_owned",):  # a condition asks a lock that may be held several times
            if hasattr(real, name):
                setattr(self, name, getattr(real, name))

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        got: bool = self._real.acquire(blocking, timeout)
        if got:
            native.host_acquire(id(self))
        return got

    def release(self) -> None:
        native.host_release(id(self))
        self._real.release()

    def locked(self) -> bool:
        return bool(self._real.locked())

    def _release_save(self) -> Any:
        native.host_release(id(self))
        if hasattr(self._real, "_release_save"):
            return self._real._release_save()
        return self._real.release()

    def _acquire_restore(self, state: Any) -> None:
        if hasattr(self._real, "_acquire_restore"):
            self._real._acquire_restore(state)
        else:
            self._real.acquire()
        native.host_acquire(id(self))

    __enter__ = acquire

    def __exit__(self, *_: Any) -> None:
        self.release()


def _wrapped(make: Callable[[], Any]) -> _Lock:
    return _Lock(make())


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Inside, threads of the host know only what they have heard of."""
    lock, again, start, run, join = (
        threading.Lock,
        threading.RLock,
        threading.Thread.start,
        threading.Thread.run,
        threading.Thread.join,
    )

    def started(self: threading.Thread) -> None:
        native.host_release(id(self))
        start(self)

    def running(self: threading.Thread) -> None:
        native.host_acquire(id(self))
        try:
            run(self)
        finally:
            native.host_release(id(self))

    def joined(self: threading.Thread, timeout: float | None = None) -> None:
        join(self, timeout)
        native.host_acquire(id(self))

    native.keep_hosts_apart(True)
    try:
        with (
            mock.patch.object(threading, "Lock", partial(_wrapped, lock)),
            mock.patch.object(threading, "RLock", partial(_wrapped, again)),
            mock.patch.object(threading.Thread, "start", started),
            mock.patch.object(threading.Thread, "run", running),
            mock.patch.object(threading.Thread, "join", joined),
        ):
            yield
    finally:
        native.keep_hosts_apart(False)
