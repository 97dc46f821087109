"""The Ctrl-C of one rehearsed rank: its handler, as the `signal` module has it, and presses at any line of the library.

Python runs a signal's handler between two instructions. So a press waits for its moment, is handed on some lines of
Penstock's code later, and the handler raises there, in whatever frame that is.
"""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.runtime.transport.interrupts import CTRL_C, CtrlC

_LIBRARY = str(Path(__file__).parents[2])
_REHEARSAL = str(Path(__file__).parent)


def swap_ctrl_c(other: dict[str, Any]) -> dict[str, Any]:
    """Have the Ctrl-C of another process, as all code here knows it; return that of the one before."""
    before = dict(vars(CTRL_C))
    vars(CTRL_C).update(other)
    return before


class Keyboard:
    """What presses Ctrl-C on one rank. `is_running` says whether its main thread runs now, and not another's."""

    def __init__(self, is_running: Callable[[], bool]) -> None:
        self._is_running = is_running
        self._handler: Any = signal.default_int_handler
        # For each press, how many lines of Penstock's code still run before it.
        self._lines: deque[int] = deque()
        self.ctrl_c = vars(CtrlC(self))

    # -- as the `signal` module

    def getsignal(self, number: int) -> Any:
        """Return the handler."""
        return self._handler

    def signal(self, number: int, handler: Any) -> Any:
        """Set the handler; return the one before."""
        before, self._handler = self._handler, handler
        return before

    # -- pressing

    def press(self, lines: int) -> None:
        """Press Ctrl-C when the rank has run so many lines more."""
        self._lines.append(lines)

    @property
    def is_pressed(self) -> bool:
        """Whether a press is to be handed on now. In the user's own code it waits for the next call that ranks make."""
        return bool(self._lines) and self._lines[0] <= 0 and self._handler is not signal.default_int_handler

    def look(self) -> None:
        """Hand on what is pressed, and begin to count lines for what will be; called as the rank goes on."""
        while self.is_pressed:
            self._lines.popleft()
            self._handler(signal.SIGINT, sys._getframe(1))
        if self._lines and sys.gettrace() is None:
            self._count()

    def _count(self) -> None:
        sys.setprofile(self._profile)
        self._trace_from(sys._getframe(2))

    def _trace_from(self, frame: FrameType | None) -> None:
        sys.settrace(self._trace)
        while frame is not None:
            frame.f_trace = self._trace
            frame = frame.f_back

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Go on tracing for the next press: Python stops tracing where a trace function raises."""
        if not self._lines:
            sys.setprofile(None)
        elif sys.gettrace() is None and self._is_running():
            self._trace_from(frame)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(_LIBRARY) or path.startswith(_REHEARSAL):
            return self._trace if event != "call" or not self._lines else None
        if event == "line" and self._lines and self._is_running():
            self._lines[0] -= 1
            if self.is_pressed:
                self._lines.popleft()
                if not self._lines:
                    sys.settrace(None)
                    sys.setprofile(None)
                self._handler(signal.SIGINT, frame)
        return self._trace
