"""Reading the files of schedules and of recorded runs, whoever wrote them: bounded, and without a wait.

A name may lead to a FIFO, which would wait for a writer, or to a device that never ends; and a file may hold more cells
than anybody could wait for. Both are found before the text is parsed.
"""

from __future__ import annotations

import json
import os
import stat
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.errors import NotationError, ScheduleError

__all__ = ["MOST_CELLS", "MOST_STAGES", "parse_json", "read_file"]

MOST_CELLS = 1_000_000  # as 1,000 ranks with 300 microbatches have; read and proved in some 10 s
MOST_STAGES = 20_000  # each costs the proof far more than a cell does
LARGEST = 256 * 2**20  # bytes


def read_file(path: str | PathLike[str], cells: int = MOST_CELLS) -> str:
    """The text of a file that has at most so many cells, or numbers."""
    path = Path(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotationError(f"{path.name} is not a plain file")
        if status.st_size > LARGEST:
            raise ScheduleError(f"{path.name} has {status.st_size:,} bytes; at most {LARGEST:,} are read")
        with open(descriptor, encoding="utf-8-sig", newline="", closefd=False) as file:
            text = file.read(LARGEST + 1)
    except UnicodeDecodeError as error:
        raise NotationError(f"{path.name} is not text in UTF-8: {error}") from error
    finally:
        os.close(descriptor)
    found = text.count(",") + text.count("\n")
    if found > cells:
        raise ScheduleError(
            f"{path.name} has about {found:,} cells; at most {cells:,} are read: build a schedule of that size with "
            "build(), which is right by construction"
        )
    return text


def parse_json(text: str) -> Any:
    """What a text in JSON says; NotationError if it is none, nests without end, or has a number of endless digits."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotationError(f"not JSON: {error}") from error
