"""A rank that compiles is not silent: the time that torch.compile takes does not count towards the timeout.

A compiled stage is compiled in its first step, forward and backward, and again for other shapes, which may take longer
than any rank should be silent. Dynamo tells when a compilation begins and ends. On threads that is all; a process says
in the store that it is compiling, as long as it does.
"""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

LONGEST_SECONDS = 3600.0  # a compilation that takes longer hangs


class Compilations:
    """Those of this process, by all its threads: dynamo tells of the first that begins and of the last that ends."""

    def __init__(self) -> None:
        self.has_begun = False  # whether there has been any, as far as it was listened to
        self._handler: Any = None
        self._begun: float | None = None
        self._ended = float("-inf")

    def listen(self) -> None:
        """Listen as soon as dynamo is loaded; loading it takes seconds, which whoever does not compile is spared."""
        dynamo: Any = sys.modules.get("torch._dynamo.callback")
        handler: Any = getattr(dynamo, "callback_handler", None)
        if handler is not None and handler is not self._handler:
            self._handler = handler
            handler.register_start_callback(self.begin)
            handler.register_end_callback(self.end)

    def begin(self, _: Any = None) -> None:
        self.has_begun, self._begun = True, monotonic()

    def end(self, _: Any = None) -> None:
        self._begun, self._ended = None, monotonic()

    def last(self) -> float:
        """Return the time until which this process is known to have compiled: now, while it does."""
        self.listen()
        begun = self._begun
        return self._ended if begun is None else min(monotonic(), begun + LONGEST_SECONDS)

    def is_under_way(self) -> bool:
        now = monotonic()
        return self.last() >= now


COMPILATIONS = Compilations()
