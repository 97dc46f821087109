"""Figures that several views show: idle time by its kind, what is in flight, numbers as people read them."""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.schedule import Op, Timeline

# Okabe and Ito's colours, which people of every kind of sight can tell apart; dark text is readable on each. The
# letter is always there too.
COLOURS = {
    Op.F: "#56b4e9",
    Op.B: "#e69f00",
    Op.I: "#f0e442",
    Op.W: "#2fb58c",
    Op.OVERLAP_F_B: "#cc79a7",
    Op.OVERLAP_B_F: "#cc79a7",
}
MEANINGS = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward for the inputs",
    Op.W: "backward for the weights",
    Op.OVERLAP_F_B: "overlapped pair",
    Op.OVERLAP_B_F: "overlapped pair",
}

# Of the colour, for each further stage of a rank: more, and one op would look like another to some people.
DARKER = 0.05
SHADES = 4

# A share of a unit from which on it is written as a whole one.
ROUNDED = 0.99995
SHARES = ("fill", "wait", "drain", "other")


class Idle(NamedTuple):
    """Shares of the makespan in which a rank does not compute."""

    fill: float  # Before its first compute.
    wait: float  # Between computes, for a peer.
    drain: float  # After its last compute.
    other: float  # Between computes, for itself: sends, the host.

    @property
    def total(self) -> float:
        return sum(self)


def shades(colour: str) -> list[str]:
    """Return a colour as it is in the first stage of a rank, in the second, and so on."""
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return ["#" + "".join(f"{round(part * (1 - DARKER * stage)):02x}" for part in parts) for stage in range(SHADES)]


def idle_shares(timeline: Timeline) -> tuple[Idle, ...]:
    """Return the idle share of each rank, by what it is."""
    whole = timeline.makespan
    found = []
    for row in timeline.by_rank:
        if not row or not whole:
            found.append(Idle(0.0, 0.0, 1.0 if whole else 0.0, 0.0))
            continue
        fill = row[0].start - timeline.start
        drain = timeline.start + whole - row[-1].end
        between = row[-1].end - row[0].start - sum(span.length for span in row)
        waits = min(sum(span.wait for span in row[1:]), max(between, 0.0))
        found.append(Idle(*(max(0.0, part) / whole for part in (fill, waits, drain, between - waits))))
    return tuple(found)


def in_flight(timeline: Timeline, rank: int) -> list[tuple[float, int]]:
    """Return (time, microbatch-stages in flight from then on) of a rank: F takes one as it starts, B or W frees it."""
    held = 0
    found: list[tuple[float, int]] = []
    changes: list[tuple[float, int]] = []
    for span in timeline.by_rank[rank]:
        for part in span.action.parts():
            if part.op is Op.F:
                changes.append((span.start, 1))
                if timeline.schedule.forward_only:
                    changes.append((span.end, -1))
            elif part.op is Op.B or part.op is Op.W:
                changes.append((span.end, -1))
    for time, change in sorted(changes):
        held += change
        if found and found[-1][0] == time:
            found[-1] = (time, held)
        else:
            found.append((time, held))
    return found


def printable(text: str) -> str:
    """Remove letters that would do something to a terminal, or that XML has no place for."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def counted(count: int, word: str) -> str:
    """Format a count: `1 rank`, `2 microbatches`."""
    plural = f"{word}es" if word.endswith("ch") else f"{word}s"
    return f"{count:,} {word if count == 1 else plural}"


def number(value: float) -> str:
    """Format a number with four digits, and no trailing zeros."""
    return f"{value:.4g}"


def bytes_text(value: float) -> str:
    """Format bytes: `1.5 GB`."""
    for name, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{number(value / size)} {name}"
    return f"{number(value)} B"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def time_text(value: float, unit: str) -> str:
    """Format a length of time with its unit; seconds are shown as s, ms or us."""
    if unit != "s":
        return f"{number(value)} {unit}".rstrip()
    for name, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= ROUNDED * size:
            return f"{number(value / size)} {name}"
    return f"{number(value / 1e-6)} us" if value else "0 s"


# What a terminal obeys instead of showing it: control characters, and those that turn the direction of text.
_OBEYED = re.compile(r"(\x1b\[[0-9;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str, *, colours: bool = False) -> str:
    """Return a text in which a terminal finds nothing to obey; with `colours`, but for these."""

    def shown(found: re.Match[str]) -> str:
        return found[0] if colours and found[1] else found[0].encode("unicode_escape").decode()

    return _OBEYED.sub(shown, text)
