"""What tests of checkpoints look at, and how they damage it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.disk.manifest import MANIFEST, seal
from penstock.checkpoint.files import tensors as body_module

ONE = {"stages": 1, "schedule": "gpipe"}


def names(directory: Path) -> list[str]:
    """What is there, the lock aside."""
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


class Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


def forge(checkpoint: Path, **files: bytes) -> None:
    """Replace files and make the manifest agree, as somebody would who means harm."""
    manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    for name, content in files.items():
        name = name.replace("__", "-").replace("_", ".")
        (checkpoint / name).write_bytes(content)
        manifest["files"][name] = [len(content), f"{__import__('zlib').crc32(content):08x}"]
    body = {key: value for key, value in manifest.items() if key not in ("format", "version", "checksum")}
    (checkpoint / MANIFEST).write_bytes(seal(body))


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    write, left = os.write, [after]

    def limited(descriptor: int, content: Any) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = content[: left[0]]
        left[0] -= len(part)
        return write(descriptor, part)

    monkeypatch.setattr(body_module.os, "write", limited)


PRECIOUS = "what this user has elsewhere"


def link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)
