"""Which ranks of a group wait for another group's: then that group is the one to find out who is silent.

A rank that does so counts its beats in the store. A count that stands still is of a rank that stopped while it waited,
and this group says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["Marks"]


class Marks:
    """One rank's view. `ask` calls the store, `fresh` is for how many seconds a count may stand still."""

    def __init__(self, ask: Callable[..., Any], key: Callable[[str], str], rank: int, ranks: int, fresh: float) -> None:
        self._ask = ask
        self._keys = [key(f"outside/{other}") for other in range(ranks)]
        self._own = self._keys[rank]
        self._fresh = fresh
        self._count = 0
        self._seen: dict[str, tuple[bytes, float]] = {}  # each count, and when it came

    def tell(self, outside: bool) -> None:
        """At every beat: whether this rank waits for another group's."""
        if outside or self._count:
            self._count = self._count + 1 if outside else 0
            self._ask("set", self._own, str(self._count))

    def forget(self) -> None:
        """What was seen is old."""
        self._seen.clear()

    def anybody(self) -> bool:
        """Whether some rank here does, as far as its count moves."""
        now, found = time.monotonic(), False
        for key in self._keys:
            count = self._ask("get", key) if self._ask("check", [key]) else b"0"
            if self._seen.get(key, (b"", 0.0))[0] != count:
                self._seen[key] = (count, now)
            found = found or (count != b"0" and now - self._seen[key][1] < self._fresh)
        return found
