"""Writing files where others may have prepared something: a link or a FIFO there leads nowhere.

A symlink in the place of a file that is to be written would have another file of this user written over, and a FIFO
would have the program wait for its other end. So a file that is written is either new, which no link can be, or opened
without following a link (`penstock.reading.open_plain`). Whoever writes a file does it through this module.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import IO, Any

from penstock.errors import UsageError
from penstock.reading import open_plain

OUTPUTS = ("/dev", "/dev/fd", "/proc/self/fd")  # have /dev/stdout, and the pipes that shells make for >(command)


def create(path: Path, mode: str = "w") -> IO[Any]:
    """Return a new file, open for writing; what had that name before is removed and not looked at."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    return open(descriptor, mode, encoding=None if "b" in mode else "utf-8", newline="" if mode == "w" else None)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, whole or not at all; what had that name is replaced, and a link there is not followed.

    Several may write it at once, as all ranks of a script do: it is then the whole file of one of them.
    """
    if str(path.parent) in OUTPUTS:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with create(partial, "w" if isinstance(content, str) else "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):
            partial.unlink()


def check_place(path: Path) -> None:
    """Raise where a file cannot be written, before the work whose results it is for."""
    folder = path.parent
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        reason = f"you may not write to {folder}" if folder.is_dir() else f"there is no folder {folder}"
        raise UsageError(f"{path} cannot be written, as {reason}; name a file elsewhere")


def save(path: str | PathLike[str], content: str | bytes) -> None:
    """Write a file that the user has named, whole or not at all; an error names a link or a FIFO that is in the way."""
    path = Path(path)
    if os.path.lexists(path) and str(path.parent) not in OUTPUTS:
        os.close(open_plain(path, os.O_WRONLY | os.O_NOFOLLOW))
    write_whole(path, content)
