"""Asking a store that may never answer.

A call to a `TCPStore` whose host is stopped does not return and heeds no timeout. So a thread of their own makes the
calls, and whoever asks can stop listening.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty
from typing import Any

from penstock.runtime.messages.clock import CLOCK, Clock


class NoAnswer(Exception):
    """The store has not answered, and the one who asked has given up."""


class Asker:
    """Makes one call at a time. `asked_at` is when the call that is under way began."""

    def __init__(self, store: Any, name: str, clock: Clock = CLOCK) -> None:
        self.asked_at: float | None = None
        self._store, self._clock = store, clock
        self._questions = clock.queue()  # Holds (method, arguments), or None at the end.
        self._answers = clock.queue()  # Holds (whether it went well, answer or error).
        self._thread = clock.worker(self._run, name)
        self._thread.start()

    def ask(self, method: str, *arguments: Any, patience: float, give_up: Callable[[float], bool]) -> Any:
        """Return the answer; after each `patience` seconds without one, ask `give_up(seconds so far)`."""
        self.asked_at = self._clock.now()
        self._questions.put((method, arguments))
        while True:
            try:
                well, answer = self._answers.get(True, patience)
                break
            except Empty:
                if give_up(self._clock.now() - self.asked_at):
                    raise NoAnswer from None
        self.asked_at = None
        if not well:
            raise answer
        return answer

    def close(self, seconds: float) -> None:
        """End the thread. One that is stuck is left behind; it is a daemon."""
        self.stop()
        self._thread.join(min(seconds, 1.0) if self.asked_at is not None else seconds)

    def stop(self) -> None:
        self._questions.put(None)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            method, arguments = question
            try:
                self._answers.put((True, getattr(self._store, method)(*arguments)))
            except Exception as error:
                self._answers.put((False, error))
