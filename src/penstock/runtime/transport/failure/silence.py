"""Which ranks of a group have a reason to be silent: they wait for another group's, or they compile.

Where one waits for another group's, that group is the one to find out who is silent. A rank with such a reason counts
its beats in the store. A count that stands still is of a rank that stopped meanwhile, and this group says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["Marks"]


class Marks:
    """One rank's view. `ask` calls the store, `fresh` is for how many seconds a count may stand still."""

    def __init__(
        self, reason: str, ask: Callable[..., Any], key: Callable[[str], str], rank: int, ranks: int, fresh: float
    ) -> None:
        self._ask = ask
        self._keys = [key(f"{reason}/{other}") for other in range(ranks)]
        self._own = self._keys[rank]
        self._fresh = fresh
        self._count = 0
        self._seen: dict[str, tuple[bytes, float]] = {}  # each count, and when it came

    def tell(self, has_reason: bool) -> None:
        """At every beat: whether this rank has the reason."""
        if has_reason or self._count:
            self._count = self._count + 1 if has_reason else 0
            self._ask("set", self._own, str(self._count))

    def forget(self) -> None:
        """What was seen is old."""
        self._seen.clear()

    def anybody(self) -> bool:
        """Whether some rank here has it, as far as its count moves."""
        now, found = time.monotonic(), False
        for key in self._keys:
            count = self._ask("get", key) if self._ask("check", [key]) else b"0"
            if self._seen.get(key, (b"", 0.0))[0] != count:
                self._seen[key] = (count, now)
            found = found or (count != b"0" and now - self._seen[key][1] < self._fresh)
        return found
