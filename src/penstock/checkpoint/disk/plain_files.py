"""Files in a folder to which others may write, such as a group's: what somebody prepared there leads nowhere.

A symlink in the place of a file that is to be written would have another file of this user written over, and a FIFO
would have the program wait for its other end. So a file that is written is either new, which no link can be, or opened
without following a link (`penstock.reading.open_plain`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO


def create(path: Path) -> TextIO:
    """Open a new file for writing; what had that name before is removed and not looked at."""
    path.unlink(missing_ok=True)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "w", encoding="utf-8")


def write_whole(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    with create(partial) as file:
        file.write(text)
    os.replace(partial, path)
