"""What ranks write into the store for each other: plain values with the run's code, and nothing that is ever executed.

Whoever reaches the store's port may write to it. So a note is taken only where its code and its form show that a rank
of this run wrote it, and under this very name: a genuine note that somebody copies elsewhere is none. The texts of
errors are cut short (`plain`), since who is to blame must be known even where a message has megabytes.
"""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

from penstock.errors import PeerFailure
from penstock.runtime.messages import plain
from penstock.runtime.messages.secret import signed, unsigned
from penstock.runtime.transport.failure.blame import Waiting
from penstock.schedule import Action

KEY = b"the store: "
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
    "place": (str, str, str, str, str),
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
