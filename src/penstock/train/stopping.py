"""Ctrl-C: once finishes the step, saves and leaves; twice leaves at once.

A handler only takes a note, and the loop asks for it between steps: no step and no save is ever cut in two. All ranks
must stop after the same step, so the loop lets them tell each other.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

__all__ = ["INTERRUPTED", "Stop", "asking"]

INTERRUPTED = 130  # the exit code of a run that was asked to stop, as a shell would say


def asking() -> tuple[signal.Signals, ...]:
    """What asks a run to stop, beside Ctrl-C: SIGTERM, and a terminal that goes, unless nohup says that it may."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Whether this process was asked to stop. Used as a context, on the main thread."""

    def __init__(self, *more: signal.Signals) -> None:
        self.asked = False
        self._signals = (signal.SIGINT, *more)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(INTERRUPTED)  # nothing is half written that a reader would take for whole
        self.asked = True
