"""When a wait has lasted too long, and which ranks have a reason to be silent: they wait for another group, or compile.

Where a rank waits for a rank of another group, that other group finds out who is silent. A rank that compiles, in the
first step and again for other shapes, may take longer than any rank should be silent. A rank with such a reason counts
its beats in the store. If its count stops growing, the rank has stopped meanwhile (or somebody wrote an old count there
again), and this group says so. Where the store itself is silent or gone, the process that has it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from time import monotonic
from typing import Any

from penstock.errors import PeerFailure
from penstock.runtime.messages.clock import CLOCK
from penstock.runtime.transport.failure.blame import Waiting
from penstock.runtime.transport.failure.notes import Bulletin, read, write
from penstock.runtime.transport.failure.peer_failures import STORE_GONE

STATE_SECONDS = 2.0  # So long ranks have to state for whom they wait: some beats.
STORE_SECONDS = 3.0  # The store must answer within this time.
OTHER_GROUP_SECONDS = 12.0  # more patience where a rank waits for another group, which has less
# Share of the beats of a timeout: a rank that had fewer lacks a processor, and so may the peer that it waits for.
STARVED_SHARE = 0.25
STARVED_TIMEOUTS = 3  # Such a rank waits for so many timeouts at most.
LONGEST_SECONDS = 3600.0  # a compilation that takes longer hangs


class StoreHost:
    """Where the store is, seen from one rank: `host` is the rank whose process has it, if a rank of the group has."""

    def __init__(self, host: int | None, rank: int) -> None:
        self.host = host
        self.is_here = host == rank
        self.far: PeerFailure | None = None  # what to say of a store that a process of another group has

    def gone(self) -> PeerFailure | None:
        """Return who is lost with the store, if it was in another process."""
        if self.host is None:
            return None if self.far is None else copy(self.far)
        return None if self.is_here else PeerFailure(self.host, STORE_GONE)

    def silent(self) -> PeerFailure | None:
        """Return who is silent with the store, if another rank has it."""
        if self.host is None or self.is_here:
            return None
        return PeerFailure(self.host, f"silent: the store that it hosts has not answered for {STORE_SECONDS:g} s")


class Marks:
    """One rank's view of who has a reason. `fresh` is for how many seconds a count may stand still."""

    def __init__(self, reason: str, bulletin: Bulletin, fresh: float, now: Callable[[], float] = CLOCK.now) -> None:
        self._bulletin, self._ask, self._now = bulletin, bulletin.ask, now
        self._keys = [bulletin.key(f"{reason}/{other}") for other in range(bulletin.ranks)]
        self._own = self._keys[bulletin.rank]
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
    """Whether this rank waits in vain, by the clock; asked at every beat."""

    def __init__(self, bulletin: Bulletin, timeout: float, beat: float, now: Callable[[], float] = CLOCK.now) -> None:
        self._timeout, self._beat, self._now = timeout, beat, now
        fresh = min(STATE_SECONDS, timeout / 2)
        self.in_other_group = Marks("outside", bulletin, fresh, now)
        self.compiling = Marks("compiling", bulletin, fresh, now)
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
