"""Reading files that anybody may have written: bounded in size, depth, memory and time, and errors that name the file.

A name may lead to a FIFO, which would wait for a writer, or to a device that never ends; a text may nest deeper than
those who walk through it can follow, or hold a number that takes minutes to write. All of it is found here, before
anybody works with what was read. Whoever reads text, JSON or TOML from a file does it through this module.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.errors import FileError
from penstock.rules import is_float

# The most of a file that is read whole, unless its reader states another number.
MOST_BYTES = 16 * 2**20
MOST_SETTINGS = 2**28  # bytes of a tokenizer, or of what else lies beside weights
MOST_TOML = 2**20  # bytes; configurations have a few thousand
MOST_PARTS = 5_000_000  # lists and objects; the largest index that is read has as many
DEEPEST = 128  # lists and objects within each other
MOST_MEMORY = 2**31  # bytes that what is read may take
SHORT = 2**20  # characters of JSON that cannot take that much, and so are read without looking at the memory
NONSENSE = (  # what libraries raise that make something of what a file says
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, NotImplementedError),
    *(OSError, ImportError, RecursionError),
)
KINDS = {dict: "an object", list: "a list", str: "a text", type(None): "nothing"}


_limit = threading.Lock()
_inside = 0  # threads that are inside of `memory_limit`; the process has one limit for all of them
_before = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


@contextmanager
def memory_limit(origin: object, most: int = 0) -> Iterator[None]:
    """Refuse what takes so many bytes of memory more than the process had; `origin` is what it is, for the error."""
    global _inside, _before
    most = most or MOST_MEMORY
    with _limit:
        if not _inside:
            _before = resource.getrlimit(resource.RLIMIT_DATA)
            pages = int(Path("/proc/self/statm").read_text().split()[5])
            room = pages * resource.getpagesize() + most
            soft = room if _before[0] == resource.RLIM_INFINITY else min(room, _before[0])
            resource.setrlimit(resource.RLIMIT_DATA, (soft, _before[1]))
        _inside += 1
    try:
        yield
    except MemoryError:
        raise FileError(origin, f"what it holds takes more than {most:,} bytes of memory") from None
    finally:
        with _limit:
            _inside -= 1
            if not _inside:
                resource.setrlimit(resource.RLIMIT_DATA, _before)


def open_plain(path: str | PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Return the descriptor of a plain file; `OSError` where something else has that name, or O_NOFOLLOW a symlink."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except ValueError as error:  # a name with a zero in it
        raise FileError(repr(path), str(error)) from None
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise FileError(path, "it is a symlink, which is not followed; remove it") from None
        if error.errno == errno.ENXIO:  # a FIFO that nobody reads, or a socket
            raise FileError(path, "it is not a plain file; remove it") from None
        raise
    status, wrong = os.fstat(descriptor), ""
    if not stat.S_ISREG(status.st_mode):
        wrong = "it is not a plain file"
    elif flags & os.O_NOFOLLOW and status.st_nlink > 1:
        wrong = "it is a hard link, by which another file would be written"
    if wrong:
        os.close(descriptor)
        raise FileError(path, f"{wrong}; remove it")
    return descriptor


def read_text(path: str | PathLike[str], most: int = MOST_BYTES, errors: str = "strict") -> str:
    """Return the text of a plain file in UTF-8, of at most so many bytes."""
    with open(open_plain(path), encoding="utf-8-sig", errors=errors, newline="") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise FileError(path, f"it has {size:,} bytes; at most {most:,} are read")
        try:
            return file.read(most)
        except UnicodeDecodeError as error:
            raise FileError(path, f"it is not text in UTF-8: {error}") from None
        except MemoryError:
            raise FileError(path, f"its {size:,} bytes do not fit into this machine's memory") from None


def read_json(path: str | PathLike[str], kind: type = dict, most: int = MOST_BYTES) -> Any:
    """Return what a JSON file holds, which must be of a kind, `dict` or `list`."""
    return parse_json(read_text(path, most), path, kind)


def parse_json(text: str | bytes, origin: object, kind: type = object) -> Any:
    """Return what a text in JSON says; `origin` is where the text is from, for the error."""
    brackets: Any = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, brackets)) > MOST_PARTS:  # each takes far more memory than its letters
        raise FileError(origin, f"it has more than {MOST_PARTS:,} lists and objects; no more are read")
    try:
        with nullcontext() if len(text) <= SHORT else memory_limit(origin):
            found = json.loads(text)
    except FileError:
        raise
    except (ValueError, RecursionError) as error:
        raise FileError(origin, f"it is not JSON: {error}") from None
    if not isinstance(found, kind):
        raise FileError(origin, f"it holds {KINDS.get(type(found), 'a number')}, and {KINDS[kind]} is due")
    return _bounded(found, origin)


def check_like(found: Any, example: Any, origin: object, place: str = "it") -> None:
    """Refuse what is not of the kinds that an example has: numbers, texts and lists in the same places.

    Where the example has None, anything is taken, and so is a key that only one of the two has.
    """
    if isinstance(example, dict) and isinstance(found, dict):
        for key in example.keys() & found.keys():
            check_like(found[key], example[key], origin, f"{place}.{key}".removeprefix("it."))
    elif isinstance(example, (list, tuple)) and isinstance(found, (list, tuple)):
        if isinstance(example, tuple) and len(found) != len(example):
            raise FileError(origin, f"{place} has {len(found)} values, where {len(example)} are due")
        for number, each in enumerate(found if example else ()):
            check_like(each, example[0], origin, f"{place}[{number}]")
    elif not _alike(found, example):
        shown = str(found)[:40] if isinstance(found, (int, float, str)) else type(found).__name__
        raise FileError(origin, f"{place} is {shown!r}, where such a value as {str(example)[:40]} is due")


def _alike(found: Any, example: Any) -> bool:
    """Return whether two values are of one kind; what is whole in the example is a number of at most 64 bits."""
    if isinstance(example, bool) or not isinstance(example, (int, float)):
        return example is None or isinstance(found, type(example))
    return is_float(found) and (isinstance(example, float) or abs(found) < 2**63)


def read_toml(path: str | PathLike[str]) -> dict[str, Any]:
    """Return what a TOML file holds."""
    return parse_toml(read_text(path, MOST_TOML), path)


def parse_toml(text: str, origin: object) -> dict[str, Any]:
    """Return what a text in TOML says; `origin` is where the text is from, for the error."""
    try:
        found = tomllib.loads(text)
        str(found)  # ValueError where a number, which may stand there in hex, has more digits than Python writes
    except (ValueError, RecursionError) as error:
        raise FileError(origin, f"it is not TOML: {error}") from None
    _bounded(found, origin)
    return found


def _bounded(found: Any, origin: object) -> Any:
    """Refuse what nests too deep for those who walk through it."""
    level = [found] if isinstance(found, (dict, list)) else []
    for _ in range(DEEPEST):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return found
    raise FileError(origin, f"it nests more than {DEEPEST} deep")


def check_folder(folder: str | PathLike[str]) -> None:
    """Refuse a folder with anything for which a library that reads all of it would wait, or fill the memory."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        try:
            status = entry.stat()
        except FileNotFoundError:  # The link leads nowhere.
            continue
        if not stat.S_ISDIR(status.st_mode):
            if not stat.S_ISREG(status.st_mode):
                raise FileError(entry.path, "it is not a plain file; remove it")
            if status.st_size > MOST_SETTINGS and entry.name.endswith((".json", ".txt", ".jinja", ".model")):
                raise FileError(entry.path, f"it has {status.st_size:,} bytes; at most {MOST_SETTINGS:,} are read")


def plain_path(path: str | PathLike[str]) -> Path:
    """Return a path for a library that opens it by itself, once there is nothing there that it would wait for."""
    os.close(open_plain(path))
    return Path(path)
