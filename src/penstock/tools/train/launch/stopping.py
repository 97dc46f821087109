"""Ctrl-C: once finishes the step, saves and leaves; twice leaves at once.

A handler only takes a note, and the loop asks for it between steps: no step and no save is ever cut in two. All ranks
must stop after the same step, so the loop has them agree.

No orphans: ranks end when what launched them does, by whatever means and in whatever state they are. All of this is
loaded before torch.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from contextlib import suppress
from time import monotonic
from types import FrameType
from typing import Any

INTERRUPTED = 130  # the exit code of a run that was asked to stop, as of a shell
# Signals this close together are one request: `timeout` sends to its child, then to the whole group.
ECHO_SECONDS = 0.5


def asking() -> tuple[signal.Signals, ...]:
    """Return what asks a run to stop, beside Ctrl-C: SIGTERM, and a closed terminal, unless nohup allows that."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGHUP)


def is_echo(since: float) -> bool:
    """Return whether a signal belongs to the request that came at that time."""
    return monotonic() - since < ECHO_SECONDS


class Stop:
    """Whether this process was asked to stop. Used as a context, on the main thread.

    `insists`: a second signal ends the process. Not where a launcher decides that, because a batch system may send
    the same request to launcher and ranks, and the launcher passes on its own.
    """

    def __init__(self, *more: signal.Signals, insists: bool = True) -> None:
        self.asked = False
        self._since = 0.0
        self._insists = insists
        self._signals = (signal.SIGINT, *more)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._note) for number in self._signals}
        _entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _entered.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._since = True, monotonic()
        elif self._insists and not is_echo(self._since):
            os._exit(INTERRUPTED)  # nothing is half written that a reader would take for whole

    def leave(self) -> None:
        """Have signals do what they do in any process."""
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)


_entered: list[Stop] = []


def _leave_in_fork() -> None:
    """Reset the signals in what a data set forks, which must end by its `terminate`.

    A handler of Python's may come too late: it does not end a sleep that begins in the moment of the signal.
    """
    while _entered:
        _entered.pop().leave()


os.register_at_fork(after_in_child=_leave_in_fork)


PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent goes, stopped or stuck as it may be."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with(launcher: int) -> None:
    """End this process when the launcher is gone; its parent may be a fork server, so a thread waits for both."""
    parent = os.getppid()
    die_with_parent()
    try:
        ended = os.pidfd_open(launcher)
    except ProcessLookupError:
        os._exit(1)
    except (OSError, AttributeError):  # a kernel older than 5.3
        return
    if os.getppid() != parent:  # The parent ended before it could be watched.
        os._exit(1)
    threading.Thread(target=_wait_and_die, args=(ended,), name="penstock-launcher", daemon=True).start()


def _wait_and_die(ended: int) -> None:
    select.select([ended], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
