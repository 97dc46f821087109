"""One run at a time writes to a directory of checkpoints.

The lock is the kernel's (`fcntl.lockf`), so it ends with its process, however that ends; a child of the process, such
as a data loader's worker that outlives it, does not inherit it. Locks of this kind do not hold between two parts of one
process, which therefore also look into a table here.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from penstock.errors import CheckpointError
from penstock.reading import open_plain

NAME = ".lock"
PATIENCE = 5.0  # seconds: a run that is being restarted may not be quite gone
_taken: set[tuple[int, int]] = set()  # (device, inode) of the locks that this process holds


class Lock:
    """Keeps other runs out of a directory, from `take` to `free`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None
        self._identity = (0, 0)

    def take(self, patience: float = 0.0) -> bool:
        """Hold it, or raise who does, after so many seconds if they are more; True where it was not held before."""
        if self._descriptor is not None:
            return False
        path = self._directory / NAME
        descriptor = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino)
        if identity in _taken:
            # not closed: that would end this process's lock. It is one small descriptor for one refused attempt.
            raise self._refusal("another Checkpointer of this process; close() it first")
        deadline = time.monotonic() + max(patience, PATIENCE)
        while not _locked(descriptor):
            if time.monotonic() > deadline:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                os.close(descriptor)
                raise self._refusal(f"{holder}; end that run, or choose another directory")
            time.sleep(0.1)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        self._descriptor, self._identity = descriptor, identity
        _taken.add(identity)
        return True

    def _refusal(self, holder: str) -> CheckpointError:
        return CheckpointError(f"{self._directory} is being written to by {holder}", path=self._directory)

    def free(self) -> None:
        if self._descriptor is not None:
            _taken.discard(self._identity)
            os.close(self._descriptor)
            self._descriptor = None


def _locked(descriptor: int) -> bool:
    with suppress(BlockingIOError, PermissionError):
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
