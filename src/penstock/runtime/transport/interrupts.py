"""Ctrl-C between messages, and never in the middle of one.

Python raises KeyboardInterrupt between any two instructions: also after a packet was read and before it was filed, or
after a message was sent and before it was counted. The links would be left in disorder, and the step that follows
would find messages of another. So while a rank on a process of its own runs a step, Ctrl-C is held back for the time
of a send, a post or a receive, and raised when that is done; a receive that waits is ended by it, with nothing taken.
Which functions these are is marked where they are defined (`uninterrupted`): the handler looks for them in the stack,
so that they themselves pay nothing for it. Computes, which take long, are interrupted as ever, but not in a finaliser:
Python drops what is raised there, so both the Ctrl-C and the rest of the finaliser would be lost. What was held back is
raised before the next action, or at the end of the step. What comes while the step is being prepared is raised before
its first action, because a rank that has not begun its step cannot tell the others that it has left it.
What comes while the step ends (a matter of a few messages) waits for that, but no longer than a second. It is raised
after the step, of which the others know nothing: they would wait for this rank in the next one. So in a loop of steps
it is owed until that one begins, and told to all there.

Once a Ctrl-C was raised, the step is being left: the next one waits for that in the same way, so that it cannot take
the rank out of the step before the others have heard of the first. One more never waits, as the second does not that
comes while the first is held back. Where it ends a step in the middle of a message, or before the messages of the step
are off the wires, no later step could tell whose they are: the group is given up (`cut`, `stopped_by_force`), and
every rank is told so.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import CodeType, FrameType
from typing import Any, TypeVar

GRACE_SECONDS = 1.0
_Function = TypeVar("_Function", bound=Callable[..., Any])
_HOLDING: set[CodeType] = set()
_WEAK_FILES = {weakref.__file__, weakref.WeakSet.__init__.__code__.co_filename}


def uninterrupted(function: _Function) -> _Function:
    """Mark a function that Ctrl-C must not interrupt.

    That is one that moves a message, or that Python calls when something dies.
    """
    _HOLDING.add(function.__code__)
    return function


def _must_end(frame: FrameType | None) -> bool:
    """Whether something is under way that must come to its end first."""
    while frame is not None:
        code = frame.f_code
        if code in _HOLDING or code.co_name == "__del__" or code.co_filename in _WEAK_FILES:
            return True
        frame = frame.f_back
    return False


class CtrlC:
    """There is one of these, as there is one handler in a process.

    `since`: when one came that is held back, or 0. `cut`: whether one was raised in the middle of a message, or of
    leaving the step because of another.
    `owed`: one of a step that is complete, which the next step raises.
    """

    def __init__(self, signals: Any = signal, now: Callable[[], float] = monotonic) -> None:
        self._signals, self._now = signals, now  # what has the handlers of this process, and its clock
        self.held = False
        self.since = 0.0
        self.ending = False
        self.cut = False
        self._left = False  # the step, because of one
        self.owed: KeyboardInterrupt | None = None
        self._before: Any = None

    @contextmanager
    def around_step(self, in_loop: bool = False) -> Iterator[None]:
        """Where this is the main thread and Ctrl-C raises: have it in hand for a step.

        In a loop, one that came as a step ended is owed to the next.
        """
        before = self._signals.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(before) or before == self._handle:
            yield
            return
        self._before, self.held, self.ending, self.cut, self.since = before, True, False, False, 0.0
        self._left, complete, raised = False, False, None
        try:
            self._signals.signal(signal.SIGINT, self._handle)
            yield
            complete = True
        except BaseException as error:
            raised = error
            raise
        finally:
            self.held = True
            self._signals.signal(signal.SIGINT, before)
            self._before, self.held = None, False
            late, self.since = self.since, 0.0
            try:
                if late and not isinstance(raised, KeyboardInterrupt):  # else it is what the user wants already
                    self._late(before, complete, in_loop, getattr(raised, "__notes__", ()))
            finally:
                del raised  # which holds this frame

    def _late(self, handler: Callable[..., Any], complete: bool, in_loop: bool, notes: Iterable[str]) -> None:
        """What came while the step was being ended; the other ranks may not have heard of it."""
        try:
            handler(signal.SIGINT, None)
        except KeyboardInterrupt as error:
            if complete and in_loop:
                self.owed = error
                return
            for note in ("this came as the step was ending: the step is complete",) if complete else notes:
                error.add_note(note)
            raise

    def begin_step(self) -> None:
        """From here on the others are told why this rank leaves the step."""
        self.held = False
        self.raise_owed()

    def raise_owed(self) -> None:
        """Raise what came as the last step of a loop ended: in the next step, or where there is none."""
        if self.owed is not None and threading.current_thread() is threading.main_thread():
            owed, self.owed = self.owed, None
            raise owed

    def end_step(self) -> None:
        """From here on the step is being ended."""
        self.held = self.ending = True

    def raise_held(self) -> None:
        """Raise what was held back: called between messages, and where a wait may be left with nothing lost."""
        mine = self._before and threading.current_thread() is threading.main_thread()
        if self.since and mine and (not self.ending or self._now() - self.since > GRACE_SECONDS):
            self._raise()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        must_end = _must_end(frame)
        if not self.since and (self.held or must_end):
            self.since = self._now()
        else:
            self._raise(frame, cut=must_end)

    def _raise(self, frame: FrameType | None = None, cut: bool = False) -> None:
        self.since = 0.0
        try:
            self._before(signal.SIGINT, frame)
        except BaseException:
            self.cut = self.cut or cut or self._left
            self._left = self.held = True
            raise


    def become(self, other: CtrlC) -> CtrlC:
        """Be that of another process, as in a rehearsal, where the ranks of many take turns; what this one was."""
        was = object.__new__(CtrlC)
        vars(was).update(vars(self))
        vars(self).update(vars(other))
        return was


CTRL_C = CtrlC()
