"""Reading the files of schedules and of recorded runs, whoever wrote them; cells are counted first."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from penstock import reading
from penstock.errors import FileError, NotationError, ScheduleError

# 1,000 ranks with 300 microbatches have as many; they are read and proved in some 10 s.
MOST_CELLS = 1_000_000
MOST_STAGES = 20_000  # each costs the proof far more than a cell does
LARGEST = 256 * 2**20  # bytes


def read_file(path: str | PathLike[str], cells: int = MOST_CELLS) -> str:
    """Read the text of a file that has at most so many cells, or numbers."""
    path = Path(path)
    try:
        text = reading.read_text(path, LARGEST)
    except FileError as error:
        raise NotationError(f"{path.name}: {error.strerror}") from None
    found = text.count(",") + text.count("\n")
    if found > cells:
        raise ScheduleError(
            f"{path.name} has about {found:,} cells; at most {cells:,} are read: build a schedule of that size with "
            "build(), which is right by construction"
        )
    return text


def parse_json(text: str) -> Any:
    """Return what a text in JSON says; NotationError if it is none."""
    try:
        return reading.parse_json(text, "text")
    except FileError as error:
        raise NotationError(str(error.strerror).removeprefix("it is ")) from None
