"""What ranks write into the store for each other: plain values with the run's code, and nothing that is ever executed.

Whoever reaches the store's port may write to it. So a note is taken only where its code and its form show that a rank
of this run wrote it, and under this very name: a genuine note that somebody copies elsewhere is none. The texts of
errors are cut short (`plain`), since who is to blame must be known even where a message has megabytes.

The first alarm and the first verdict stand, by the store's compare-and-set, so all ranks read the same ones. An alarm
that names nobody may be called off; then there may be another. Whoever writes one of these, or news, says so under
one more key: mostly nothing has changed since a rank's last look, and that key alone tells.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from penstock.errors import PeerFailure
from penstock.runtime.messages import plain
from penstock.runtime.messages.secret import signed, unsigned
from penstock.runtime.transport.failure.blame import State, Waiting
from penstock.schedule import Action

KEY = b"the store: "
LATEST = "latest"  # the key that changes with every note that all ranks should see
NOTE_CHARACTERS = 1024 * 1024  # Longer texts are cut short.
PARTS: dict[str, tuple[Any, ...]] = {  # what is in each kind of note, part by part
    "verdict": (PeerFailure,),
    "news": (PeerFailure,),
    "alarm": (int, Waiting | None, PeerFailure | None, bool),
    "state": (Waiting | None, str, Action | None, int, str, float, dict, tuple | None),
    "off": (dict,),
    "call": (int, str),
    "seen": (),
    "mark": (int, bool),
    "place": (str, str, str, str),
    "apart": (str,),
    "answer": (str,),
}
STRANGER = (
    "that no rank of this run has written: the ranks have different secrets, or somebody else writes to it; see "
    "docs/explanations/security.md for how to confine it"
)


class Tampered(Exception):
    """Under a key of this run is something that no rank of it has written."""


class Alarm(NamedTuple):
    """The first word that something is wrong: who says so, for whom it waits, and what it knows.

    `heard`: the culprit is alive, and can say what it does.
    """

    rank: int
    waiting: Waiting | None
    failure: PeerFailure | None
    heard: bool = False


def write(name: str, *parts: Any) -> str:
    """Write the text of the note that the store keeps under this name."""
    return base64.b64encode(signed(plain.dumps(parts), KEY + name.encode())).decode()


def read(kind: str, name: str, text: bytes) -> tuple[Any, ...]:
    """Read the parts of a note that a rank of this run wrote under this name; raise `Tampered` where none did."""
    if len(text) > NOTE_CHARACTERS:
        raise Tampered(kind)
    try:
        content = unsigned(base64.b64decode(text, validate=True), KEY + name.encode())
        parts = None if content is None else plain.loads(content)
    except ValueError:
        parts = None
    wanted = PARTS[kind]
    if not isinstance(parts, tuple) or len(parts) != len(wanted) or not all(map(isinstance, parts, wanted)):
        raise Tampered(kind)
    if kind == "alarm" and parts[1] is None and parts[2] is None:
        raise Tampered(kind)
    return parts


class Bulletin:
    """One rank's view of the notes of its transport. `ask` calls the store."""

    def __init__(self, ask: Callable[..., Any], prefix: str, rank: int, ranks: int) -> None:
        self.ask, self.rank, self.ranks = ask, rank, ranks
        self.latest = b""  # identifies the latest note that this rank knows of
        self.round = 0  # alarms that were called off, as far as this rank has heard
        self._prefix = prefix
        self._said: tuple[int, str] | None = None  # about this rank's call
        self._looked: tuple[bytes, int] | None = None  # the latest at its last look, and the step
        self._written = 0  # notes of this rank

    def key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _read(self, kind: str, number: int | str | None = None) -> tuple[Any, ...] | None:
        key = self.key(kind if number is None else f"{kind}/{number}")
        return read(kind, key, self.ask("get", key)) if self.ask("check", [key]) else None

    def _read_part(self, kind: str, number: int | None = None) -> Any:
        """Return the one part that such a note has, if there is one."""
        found = self._read(kind, number)
        return None if found is None else found[0]

    def _write(self, name: str, *parts: Any, first: bool = False) -> None:
        """Write a note; one that must be the `first` of its name only unless there is one, and all are to look."""
        key = self.key(name)
        if not first:
            self.ask("set", key, write(key, *parts))
            return
        self.ask("compare_set", key, "", write(key, *parts))
        self.tell_of_note()

    def tell_of_note(self) -> None:
        """Announce that there is something new for all to look at."""
        self._written += 1
        self.ask("set", self.key(LATEST), f"{self._written} of rank {self.rank}")  # unlike any before

    def has_changed(self, step: int) -> bool:
        """Return whether there may be a verdict, an alarm or news that this rank has not seen in this step."""
        key = self.key(LATEST)
        self.latest = self.ask("get", key) if self.ask("check", [key]) else b""  # mostly there is no note yet
        return (self.latest, step) != self._looked

    def has_looked(self, step: int) -> None:
        """Note that this rank has seen all that there was when it asked, in that step, whether anything has changed."""
        self._looked = self.latest, step

    def verdict(self) -> PeerFailure | None:
        found: PeerFailure | None = self._read_part("verdict")
        return found

    def pronounce(self, failure: PeerFailure) -> PeerFailure:
        """Make it the verdict, where there is none; returns the one that stands."""
        self._write("verdict", failure, first=True)
        return self.verdict() or failure

    def alarm(self) -> Alarm | None:
        note = self._read("alarm", self.round)
        return None if note is None else Alarm(*note)

    def raise_alarm(self, alarm: Alarm) -> None:
        self._write(f"alarm/{self.round}", *alarm, first=True)

    def call_off(self, excused: Mapping[int, float]) -> None:
        """Call the alarm off. `excused`: who may wait on, and how many seconds ago each last had a reason."""
        self._write(f"off/{self.round}", dict(excused), first=True)

    def called_off(self) -> dict[int, float] | None:
        """Return the ranks that may wait on, if the alarm was called off; see `call_off`."""
        found: dict[int, float] | None = self._read_part("off", self.round)
        return found

    def tell_news(self, step: int, failure: PeerFailure) -> None:
        """Report that the step has failed; the first report counts."""
        self._write(f"news/{step}", failure, first=True)

    def news(self, step: int) -> PeerFailure | None:
        """Return why the step has failed, if it has."""
        found: PeerFailure | None = self._read_part("news", step)
        return found

    def tell_state(self, state: State) -> None:
        """Report what this rank does, for the alarm that stands."""
        self._write(f"state/{self.round}/{self.rank}", *state)

    def states(self, ranks: Iterable[int]) -> dict[int, State]:
        """Return what these ranks do, of those that have reported it."""
        notes = {rank: self._read("state", f"{self.round}/{rank}") for rank in ranks}
        return {rank: State(*note) for rank, note in notes.items() if note is not None}

    def tell_call(self, step: int, call: str) -> None:
        """Report in which call this rank is, after so many exchanges; once."""
        if (step, call) != self._said:
            self._write(f"call/{self.rank}", step, call)
            self._said = step, call

    def calls(self, step: int) -> list[str]:
        """Return in which call each rank is, where all have reported that after so many exchanges; else none."""
        keys = [self.key(f"call/{rank}") for rank in range(self.ranks)]
        if not self.ask("check", keys):
            return []
        told = [read("call", key, self.ask("get", key)) for key in keys]
        return [call for _, call in told] if all(at == step for at, _ in told) else []

    def tell_read(self) -> None:
        self._write(f"seen/{self.rank}")

    def have_read(self, ranks: Iterable[int]) -> bool:
        return all(self._read("seen", rank) is not None for rank in ranks)
