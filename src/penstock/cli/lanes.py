"""Who sends what to whom, as a picture: a lane for each rank, a line for each event, time downwards.

Programs of the primer print plain lines and know nothing of this drawing:

    rank 0 -> rank 1, 3: [3, 1]        rank 0 sends [3, 1] to ranks 1 and 3
    rank 2: has [3, 1]                 something about rank 2 alone
    anything else                      as it is

    0     1     2     3
    o---->|-----+---->|     [3, 1]
    |     |     o     |     has [3, 1]
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.text import Text

SENDS = re.compile(r"rank (?P<source>\d+) -> rank (?P<targets>\d+(?:, \d+)*): (?P<text>.*)")
ALONE = re.compile(r"rank (?P<source>\d+): (?P<text>.*)")
COLOURS = ("cyan", "magenta", "yellow", "green", "bright_blue", "bright_red", "bright_cyan", "bright_magenta")
WIDEST, NARROWEST = 6, 3  # columns of a lane; fewer where there are many ranks
LEAST = 24  # columns for the words, however narrow the terminal
PRETTY = {"o": "●", "-": "─", ">": "▶", "<": "◀", "|": "│", "+": "┼"}


@dataclass(frozen=True)
class LaneEvent:
    """One line that a program printed."""

    text: str
    source: int | None = None
    targets: tuple[int, ...] = ()

    @property
    def highest(self) -> int:
        """The highest rank in it; -1 where it names none."""
        return max((-1 if self.source is None else self.source, *self.targets))


def read_event(line: str) -> LaneEvent:
    """Read an event from a line that a program printed."""
    if found := SENDS.fullmatch(line):
        targets = tuple(int(rank) for rank in found["targets"].split(", "))
        return LaneEvent(found["text"], int(found["source"]), targets)
    if found := ALONE.fullmatch(line):
        return LaneEvent(found["text"], int(found["source"]))
    return LaneEvent(line)


class Lanes:
    """Draws events of `ranks` ranks: in plain letters where the terminal has no others, as wide as it is."""

    def __init__(self, ranks: int, *, width: int | None = None, plain: bool = False) -> None:
        self.ranks = ranks
        self._lane = WIDEST
        if width is not None and ranks:
            self._lane = min(WIDEST, max(NARROWEST, (width - LEAST) // ranks))
        self._room = None if width is None else max(LEAST, width - ranks * self._lane - 1)
        self._letters = str.maketrans({} if plain else PRETTY)

    def draw(self, events: Iterable[LaneEvent]) -> Iterator[Text]:
        """Yield the lines; the ranks' numbers stand above whenever lanes begin anew."""
        inside = False
        for event in events:
            if event.source is None:
                yield Text(event.text)
                inside = False
                continue
            if not inside:
                yield self._heading()
                inside = True
            yield from self._lines(event)

    def _heading(self) -> Text:
        heading = Text()
        for rank in range(self.ranks):
            heading.append(str(rank).ljust(self._lane), f"bold {COLOURS[rank % len(COLOURS)]}")
        return heading

    def _lines(self, event: LaneEvent) -> Iterator[Text]:
        words = event.text.split("\n") if self._room is None else textwrap.wrap(event.text, self._room) or [""]
        yield self._row(event) + Text(words[0])
        for more in words[1:]:
            yield self._row(LaneEvent("")) + Text(more)

    def _row(self, event: LaneEvent) -> Text:
        lane = self._lane
        cells = list(("|" + " " * (lane - 1)) * self.ranks)
        if event.source is None:
            return Text("".join(cells).translate(self._letters))
        ends = (event.source, *event.targets)
        painted = range(min(ends) * lane, max(ends) * lane + 1)
        for column in painted:
            cells[column] = "+" if cells[column] == "|" else "-"
        for target in event.targets:
            cells[target * lane] = "|"
            if target != event.source:
                cells[target * lane + (-1 if target > event.source else 1)] = ">" if target > event.source else "<"
        cells[event.source * lane] = "o"
        row = Text("".join(cells).translate(self._letters))
        row.stylize(f"bold {COLOURS[event.source % len(COLOURS)]}", painted.start, painted.stop)
        return row
