"""Asking a store that may never answer.

A call to a `TCPStore` whose host is stopped does not return and heeds no timeout. So the calls
are made by a thread of their own, and whoever asks can stop listening.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any


class NoAnswer(Exception):
    """The store has not answered, and the one who asked has given up."""


class Asker:
    """Makes one call at a time. `asked_at` is when the call that is under way began."""

    def __init__(self, store: Any, name: str) -> None:
        self.asked_at: float | None = None
        self._store = store
        self._questions: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(self, method: str, *arguments: Any, patience: float, give_up: Callable[[float], bool]) -> Any:
        """The answer; every `patience` seconds without one, `give_up(seconds so far)` decides whether to go on."""
        self.asked_at = time.monotonic()
        self._questions.put((method, arguments))
        while True:
            try:
                well, answer = self._answers.get(timeout=patience)
                break
            except Empty:
                if give_up(time.monotonic() - self.asked_at):
                    raise NoAnswer from None
        self.asked_at = None
        if not well:
            raise answer
        return answer

    def close(self, seconds: float) -> None:
        """End the thread. One that is stuck is left behind; it is a daemon."""
        self._questions.put(None)
        self._thread.join(min(seconds, 1.0) if self.asked_at is not None else seconds)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            method, arguments = question
            try:
                self._answers.put((True, getattr(self._store, method)(*arguments)))
            except Exception as error:
                self._answers.put((False, error))
