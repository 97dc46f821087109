"""Which ranks of a group have a reason to be silent: they wait for another group's, or they compile.

Where one waits for another group's, that group is the one to find out who is silent. A rank with such a reason counts
its beats in the store. A count that does not grow is of a rank that stopped meanwhile (or is an old one that somebody
wrote there again), and this group says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from penstock.runtime.transport.failure.notes import read, write


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
        self._has_reason = False
        self._seen: dict[str, tuple[int, float]] = {}  # the highest count of each rank, and when it came

    def tell(self, has_reason: bool) -> None:
        """At every beat: whether this rank has the reason."""
        if has_reason or self._has_reason:
            self._count += 1
            self._has_reason = has_reason
            self._ask("set", self._own, write(self._own, self._count, has_reason))

    def anybody(self) -> bool:
        """Whether some rank here has it, as far as its count moves."""
        now, found = time.monotonic(), False
        for key in self._keys:
            if not self._ask("check", [key]):
                continue
            count, has_reason = read("mark", key, self._ask("get", key))
            highest, came = self._seen.get(key, (0, 0.0))
            if count > highest:
                came = now
                self._seen[key] = count, came
            found = found or (has_reason and now - came < self._fresh)
        return found
