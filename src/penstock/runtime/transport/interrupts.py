"""Ctrl-C where the other ranks can be told of it, and never in the middle of a message.

Python raises KeyboardInterrupt between any two instructions: also after a packet was read and before it was filed, or
while a step is being prepared, which the others would never hear. So in a call that all ranks make, Ctrl-C is raised
only while the program of a step runs, where a failure travels in the place of messages, and there not within a send, a
post or a receive (functions marked `uninterrupted`, for which the handler looks in the stack), nor in a finaliser,
where Python would drop it. What comes elsewhere is held until the next program runs: before the first action of this
step or, where the step is complete and one of a loop, of the next one (`owed`). The state of this is one value:

    outside --begin--> closed --open--> open --close--> closed --end--> outside
    closed --press--> held --open--> due --raise--> left --end--> outside
    open --press--> left --press--> again --end--> outside
    open --message--> due --close--> held --end--> outside
    held --owe--> owed --begin--> held --press--> cut --end--> outside
    due --press--> cut --press--> cut
    due --owe--> owed --settle--> held
    again --owe--> owed --release--> outside
    again --press--> cut
    due --heard--> open --end--> outside
    outside --settle--> waiting --press--> due --end--> outside
    waiting --end--> outside

`press` is Ctrl-C and `message` one in the middle of a message; `open` and `close` are the ends of the program, `end`
(or `owe`) that of the call; what is not drawn leaves the state as it is. In `held`, `due` and `again` one is held back:
`due` is raised between two messages, or by a wait that may be left with nothing lost. Another one does not wait: it is
raised at once, wherever that is (`cut`). Then nobody could tell whose messages those on the wires are, and the group is
given up, of which every rank hears at once; one that comes while that is done is dropped. In `left` the step is being
left because of one, of which the others are told: the next is held once more. `waiting` is for a call that only
collects what others report: it may be left.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from types import CodeType, FrameType
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_HOLDING: set[CodeType] = set()
_WEAK_FILES = {weakref.__file__, weakref.WeakSet.__init__.__code__.co_filename}


# Where this process is, as far as Ctrl-C goes.
State = StrEnum("State", ["OUTSIDE", "CLOSED", "OPEN", "WAITING", "HELD", "DUE", "LEFT", "AGAIN", "CUT", "OWED"])
OUTSIDE, CLOSED, OPEN, WAITING, HELD, DUE, LEFT, AGAIN, CUT, OWED = State
HOLDING = (HELD, DUE, AGAIN)
TRANSITIONS = {
    OUTSIDE: {"begin": CLOSED, "settle": WAITING},
    CLOSED: {"press": HELD, "open": OPEN, "end": OUTSIDE},
    OPEN: {"press": LEFT, "message": DUE, "close": CLOSED, "end": OUTSIDE},
    WAITING: {"press": DUE, "end": OUTSIDE},
    HELD: {"press": CUT, "open": DUE, "end": OUTSIDE, "owe": OWED},
    DUE: {"press": CUT, "raise": LEFT, "heard": OPEN, "close": HELD, "end": OUTSIDE, "owe": OWED},
    LEFT: {"press": AGAIN, "end": OUTSIDE},
    AGAIN: {"press": CUT, "end": OUTSIDE, "owe": OWED},
    CUT: {"press": CUT, "end": OUTSIDE},
    OWED: {"begin": HELD, "settle": HELD, "release": OUTSIDE},
}


def uninterrupted(function: _Function) -> _Function:
    """Mark a function that Ctrl-C must not interrupt: it moves a message, or Python calls it when something dies."""
    _HOLDING.add(function.__code__)
    return function


def _running(frame: FrameType | None) -> Iterator[CodeType]:
    """Yield the code of a frame, of its caller, and so on."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _must_end(frame: FrameType | None) -> bool:
    """Return whether something is under way that must come to its end first."""
    return any(
        code in _HOLDING or code.co_name == "__del__" or code.co_filename in _WEAK_FILES for code in _running(frame)
    )


def _gives_up(frame: FrameType | None) -> bool:
    """Return whether a call is just being left, where the group is given up."""
    return CtrlC.around_step.__wrapped__.__code__ in _running(frame)  # type: ignore[attr-defined]


class CtrlC:
    """There is one of these, as there is one handler in a process. `signals` is what has that, as the module does."""

    def __init__(self, signals: Any = signal) -> None:
        self.state = OUTSIDE
        self._signals = signals
        self._before: Any = None  # the handler outside of steps

    def go(self, event: str) -> None:
        self.state = TRANSITIONS[self.state].get(event, self.state)

    @contextmanager
    def around_step(
        self, in_loop: bool = False, settles: bool = False, give_up: Callable[[], object] = lambda: None
    ) -> Iterator[None]:
        """Have Ctrl-C in hand for a step, where this is the main thread and Ctrl-C raises.

        In a loop, one that came as a step ended is owed to the next. A call that only `settles` may be left where it
        waits. `give_up` is called where one was raised by force.
        """
        before = self._signals.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(before) or before == self._handle:
            yield
            return
        if self.state is not OWED:  # one that came in the last lines below has left the call before with its state
            self.state = OUTSIDE
        self._before, complete, raised = before, False, None
        try:
            self.go("settle" if settles else "begin")
            self._signals.signal(signal.SIGINT, self._handle)
            yield
            complete = True
        except BaseException as error:
            raised = error
            raise
        finally:
            if self.state is CUT:
                give_up()
            self._signals.signal(signal.SIGINT, before)
            # A KeyboardInterrupt is what the user wants.
            late = self.state in HOLDING and not isinstance(raised, KeyboardInterrupt)
            self.go("owe" if late and complete and in_loop else "end")
            try:
                if late and self.state is OUTSIDE:
                    self._late(before, complete, getattr(raised, "__notes__", ()))
            finally:
                del raised  # It holds this frame.

    def _late(self, handler: Callable[..., Any], complete: bool, notes: Iterable[str]) -> None:
        """Raise what came while the step was being ended, of which the other ranks may not have heard."""
        try:
            handler(signal.SIGINT, None)
        except KeyboardInterrupt as error:
            for note in ("this came as the step was ending: the step is complete",) if complete else notes:
                error.add_note(note)
            raise

    def raise_owed(self) -> None:
        """Raise what came as the last step of a loop ended, where no step follows."""
        if self.state is OWED and threading.current_thread() is threading.main_thread():
            self.go("release")
            self._signals.getsignal(signal.SIGINT)(signal.SIGINT, None)

    def raise_due(self) -> None:
        """Raise what was held back: called between messages, and where a wait may be left with nothing lost."""
        if self.state is DUE and threading.current_thread() is threading.main_thread():
            self._raise(None, "raise")
            self.go("heard")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.state is CUT and _gives_up(frame):
            return  # One is on its way to the user already, and this one would leave the group as it is.
        event = "message" if self.state is OPEN and _must_end(frame) else "press"
        if TRANSITIONS[self.state].get(event) in HOLDING:
            self.go(event)
        else:
            self._raise(frame, event)

    def _raise(self, frame: FrameType | None, event: str) -> None:
        """Do what Ctrl-C does outside of steps, and go on as drawn if it raises."""
        try:
            self._before(signal.SIGINT, frame)
        except BaseException:
            self.go(event)
            raise


CTRL_C = CtrlC()
