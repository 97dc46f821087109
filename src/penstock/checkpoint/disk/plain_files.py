"""Files in a folder to which others may write, such as a group's: what somebody prepared there leads nowhere.

A symlink in the place of a file that is to be written would have another file of this user written over, and a FIFO
would have the program wait for its other end. So a file that is written is either new, which no link can be, or opened
without following a link; and none is used that is not a plain file.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TextIO

MOST_BYTES = 16 * 2**20  # of a file that is read whole, where nothing else is said


def open_plain(path: Path, flags: int) -> int:
    """The descriptor of a plain file; `OSError` where something else has that name, or with O_NOFOLLOW a symlink."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a symlink, which is not followed; remove it", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file; remove it", str(path))
    return descriptor


def read_plain(path: Path, most: int | None = MOST_BYTES) -> str:
    """The text of a plain file, of at most so many bytes."""
    with open(open_plain(path, os.O_RDONLY), encoding="utf-8", errors="replace") as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes; at most {most:,} are read", str(path))
        return file.read(most)


def create(path: Path) -> TextIO:
    """A new file, open for writing; what had that name before is removed and not looked at."""
    path.unlink(missing_ok=True)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "w", encoding="utf-8")


def write_whole(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    with create(partial) as file:
        file.write(text)
    os.replace(partial, path)


def is_foreign_link(path: Path) -> bool:
    """Whether a symlink of another user has that name, who thereby says where this one writes; root's are trusted."""
    return path.is_symlink() and path.lstat().st_uid not in (os.getuid(), 0)
