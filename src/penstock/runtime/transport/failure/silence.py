"""When a wait has lasted too long, and which ranks have a reason to be silent: they wait for another group, or compile.

Where a rank waits for a rank of another group, that other group finds out who is silent. A rank with such a reason
counts its beats in the store. If its count stops growing, the rank has stopped meanwhile (or somebody wrote an old
count there again), and this group says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.runtime.messages.clock import CLOCK
from penstock.runtime.transport.failure.blame import Waiting
from penstock.runtime.transport.failure.bulletin import Bulletin
from penstock.runtime.transport.failure.notes import read, write

OTHER_GROUP_SECONDS = 12.0  # more patience where a rank waits for another group, which has less
STARVED_SHARE = (
    # Share of the beats of a timeout: a rank that had fewer lacks a processor, and so may the peer that it waits for.
    0.25
)
STARVED_TIMEOUTS = 3  # Such a rank waits for so many timeouts at most.


class Marks:
    """One rank's view. `ask` calls the store, `fresh` is for how many seconds a count may stand still."""

    def __init__(
        self,
        reason: str,
        ask: Callable[..., Any],
        bulletin: Bulletin,
        rank: int,
        ranks: int,
        fresh: float,
        now: Callable[[], float] = CLOCK.now,
    ) -> None:
        self._ask, self._now = ask, now
        self._bulletin = bulletin
        self._keys = [bulletin.key(f"{reason}/{other}") for other in range(ranks)]
        self._own = self._keys[rank]
        self._ever = bulletin.key(f"{reason}/ever")  # whether any rank has ever had it: mostly none has
        self._nobody: bytes | None = None  # the latest note when none had
        self._fresh = fresh
        self._count = 0
        self._has_reason = False
        self._seen: dict[str, tuple[int, float]] = {}  # the highest count of each rank, and when it came

    def tell(self, has_reason: bool) -> None:
        """Note at every beat whether this rank has the reason."""
        if has_reason or self._has_reason:
            if not self._count:
                self._ask("set", self._ever, "yes")
                self._bulletin.tell_of_note()
            self._count += 1
            self._has_reason = has_reason
            self._ask("set", self._own, write(self._own, self._count, has_reason))

    def anybody(self) -> bool:
        """Return whether some rank here has it, as far as its count moves."""
        now, found = self._now(), False
        if self._nobody == self._bulletin.latest:
            return False
        if not self._ask("check", [self._ever]):
            self._nobody = self._bulletin.latest
            return False
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


class Overdue:
    """Whether this rank waits in vain, by the clock; asked at every beat.

    `make_marks` is given a reason to be silent.
    """

    def __init__(
        self, timeout: float, beat: float, make_marks: Callable[[str], Marks], now: Callable[[], float] = CLOCK.now
    ) -> None:
        self._timeout, self._beat, self._now = timeout, beat, now
        self.in_other_group, self.compiling = make_marks("outside"), make_marks("compiling")
        # Time until which some rank compiled, or one that this rank waits for moved on.
        self._excused = float("-inf")
        self._looks = 0  # Counted since the main thread waits as it does now.
        self._watched: Waiting | None = None

    def __call__(self, waiting: Waiting | None) -> bool:
        """Return whether to raise an alarm that names nobody."""
        now = self._now()
        self._looks, self._watched = self._looks + 1 if waiting == self._watched else 0, waiting
        if waiting is None or now - waiting.since < self._timeout / 2:
            return False
        if self.compiling.anybody():
            self.excuse(now)
        waited = self.waited(waiting) - (OTHER_GROUP_SECONDS if self.in_other_group.anybody() else 0.0)
        starved = self._looks < STARVED_SHARE * self._timeout / self._beat
        return waited > self._timeout and (not starved or waited > STARVED_TIMEOUTS * self._timeout)

    def excuse(self, until: float) -> None:
        """Count waits from that time on: until then there was a reason to wait."""
        self._excused = max(self._excused, until)

    def waited(self, waiting: Waiting) -> float:
        """Return for how many seconds it has waited since there was last a reason to."""
        return self._now() - max(waiting.since, self._excused)
