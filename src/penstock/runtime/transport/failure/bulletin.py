"""The part of the store in which the ranks of one transport leave notes for each other, by the names that these have.

The first alarm and the first verdict stand, by the store's compare-and-set, so all ranks read the same ones. An alarm
that names nobody may be called off; then there may be another. Whoever writes one of these, or news, says so under
one more key: mostly nothing has changed since a rank's last look, and that key alone tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.errors import PeerFailure
from penstock.runtime.transport.failure.blame import State
from penstock.runtime.transport.failure.notes import Alarm, read, write

LATEST = "latest"  # the key that changes with every note that all ranks should see


class Bulletin:
    """One rank's view. `ask` calls the store."""

    def __init__(self, ask: Callable[..., Any], prefix: str, rank: int, ranks: int) -> None:
        self._ask = ask
        self._prefix = prefix
        self._rank, self._ranks = rank, ranks
        self._said: tuple[int, str] | None = None  # about this rank's call
        # Identifies the latest note that this rank knows of.
        self.latest = b""
        self._looked: tuple[bytes, int] | None = None  # the latest at its last look, and the step
        self._written = 0  # notes of this rank
        self.round = 0  # alarms that were called off, as far as this rank has heard

    def key(self, name: str) -> str:
        """Return where a note is in the store."""
        return f"{self._prefix}/{name}"

    def _read(self, kind: str, number: int | str | None = None) -> tuple[Any, ...] | None:
        key = self.key(kind if number is None else f"{kind}/{number}")
        return read(kind, key, self._ask("get", key)) if self._ask("check", [key]) else None

    def _write_first(self, name: str, *parts: Any) -> None:
        """Write a note unless there is one already."""
        key = self.key(name)
        self._ask("compare_set", key, "", write(key, *parts))
        self.tell_of_note()

    def _write(self, name: str, *parts: Any) -> None:
        key = self.key(name)
        self._ask("set", key, write(key, *parts))

    def tell_of_note(self) -> None:
        """Announce that there is something new for all to look at."""
        self._written += 1
        self._ask("set", self.key(LATEST), f"{self._written} of rank {self._rank}")  # unlike any before

    def has_changed(self, step: int) -> bool:
        """Return whether there may be a verdict, an alarm or news that this rank has not seen, or it is in another
        step.
        """
        key = self.key(LATEST)
        self.latest = self._ask("get", key) if self._ask("check", [key]) else b""  # mostly there is no note yet
        return (self.latest, step) != self._looked

    def has_looked(self, step: int) -> None:
        """Note that this rank has seen all that there was when it asked, in that step, whether anything has changed."""
        self._looked = self.latest, step

    def verdict(self) -> PeerFailure | None:
        """Return the verdict that stands, if there is one."""
        note = self._read("verdict")
        return None if note is None else note[0]

    def pronounce(self, failure: PeerFailure) -> PeerFailure:
        """Make it the verdict, where there is none; returns the one that stands."""
        self._write_first("verdict", failure)
        return self.verdict() or failure

    def alarm(self) -> Alarm | None:
        """Return the alarm that stands, if there is one."""
        note = self._read("alarm", self.round)
        return None if note is None else Alarm(*note)

    def raise_alarm(self, alarm: Alarm) -> None:
        """Raise an alarm unless there is one."""
        self._write_first(f"alarm/{self.round}", *alarm)

    def call_off(self, excused: Mapping[int, float]) -> None:
        """Call the alarm off. `excused`: who may wait on, and how many seconds ago each last had a reason."""
        self._write_first(f"off/{self.round}", dict(excused))

    def called_off(self) -> dict[int, float] | None:
        """Return the ranks that may wait on, if the alarm was called off; see `call_off`."""
        note = self._read("off", self.round)
        return None if note is None else note[0]

    def tell_news(self, step: int, failure: PeerFailure) -> None:
        """Report that the step has failed; the first report counts."""
        self._write_first(f"news/{step}", failure)

    def news(self, step: int) -> PeerFailure | None:
        """Return why the step has failed, if it has."""
        note = self._read("news", step)
        return None if note is None else note[0]

    def tell_state(self, state: State) -> None:
        """Report what this rank does, for the alarm that stands."""
        self._write(f"state/{self.round}/{self._rank}", *state)

    def states(self, ranks: Iterable[int]) -> dict[int, State]:
        """Return what these ranks do, of those that have reported it."""
        notes = {rank: self._read("state", f"{self.round}/{rank}") for rank in ranks}
        return {rank: State(*note) for rank, note in notes.items() if note is not None}

    def tell_call(self, step: int, call: str) -> None:
        """Report in which call this rank is, after so many exchanges; once."""
        if (step, call) != self._said:
            self._write(f"call/{self._rank}", step, call)
            self._said = step, call

    def calls(self, step: int) -> list[str]:
        """Return in which call each rank is, where all have reported that after so many exchanges; else none."""
        keys = [self.key(f"call/{rank}") for rank in range(self._ranks)]
        if not self._ask("check", keys):
            return []
        told = [read("call", key, self._ask("get", key)) for key in keys]
        return [call for _, call in told] if all(at == step for at, _ in told) else []

    def tell_read(self) -> None:
        """Report that this rank has read the verdict."""
        self._write(f"seen/{self._rank}")

    def have_read(self, ranks: Iterable[int]) -> bool:
        """Return whether all these ranks have read it."""
        return all(self._read("seen", rank) is not None for rank in ranks)
