"""Where the checkpoints of a run are: their names, who may write, and which are kept. Process 0's work.

A name is never given twice: a step that is saved again gets `step-00000100.1`, and the older one is deleted once the
newer one is whole. So no rename ever takes a checkpoint away.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Set
from itertools import count
from pathlib import Path
from typing import NamedTuple

from penstock.checkpoint.disk.lock import Lock
from penstock.checkpoint.disk.manifest import best_of, checkpoints_in, folder_name, newest_first
from penstock.checkpoint.save.saving import remove
from penstock.errors import CheckpointError

# Seconds within which the other processes must see a directory that process 0 made.
SHARED_SECONDS = 10.0


class CheckpointFolder(NamedTuple):
    """Where a checkpoint is written, what it will be called, and its number."""

    temporary: Path
    final: Path
    serial: int


def _made(final: Path, serial: int) -> CheckpointFolder:
    temporary = final.with_name(f".{final.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    return CheckpointFolder(temporary, final, serial)


class Directory:
    """A directory that one run at a time writes to, from its first save on."""

    def __init__(self, path: Path, keep_last: int | None, keep_every: int | None, keep_best: bool = False) -> None:
        self.path = path
        self._keep_best = keep_best
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._lock = Lock(path)
        self._serial = 0

    def place(self, step: int, planned: Set[str]) -> CheckpointFolder:
        """Make the hidden directory of the next checkpoint. `planned` are names of saves under way."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self._lock.take():
            self._clean()
        taken = planned | {named.path.name for named in checkpoints_in(self.path)}
        name = next(name for again in count() if (name := folder_name(step, again)) not in taken)
        self._serial += 1
        return _made(self.path / name, self._serial)

    def _clean(self) -> None:
        """Remove what runs that were killed have left: nobody else writes here now."""
        for entry in os.scandir(self.path):
            if entry.name.startswith((".step-", ".trash-")) and entry.is_dir(follow_symlinks=False):
                remove(Path(entry.path))
        self._serial = max((manifest.serial for _, manifest in newest_first(self.path)[0]), default=0)

    def tidy(self, newest: Path) -> None:
        """Delete checkpoints that need not be kept, now that one has got its name. Damaged ones are not touched."""
        whole = newest_first(self.path)[0]
        best = best_of(whole) if self._keep_best else None
        seen: set[int] = set()
        last = 0
        for path, manifest in whole:
            superseded = manifest.step in seen  # the same step was saved again since
            seen.add(manifest.step)
            if superseded:
                remove(path)
                continue
            if manifest.while_best:  # beside the others: it takes no place of theirs
                if path not in (newest, best):
                    remove(path)
                continue
            last += 1
            kept = self._keep_every is not None and manifest.step % self._keep_every == 0
            late = self._keep_last is not None and last > self._keep_last
            if path not in (newest, best) and late and not kept:
                remove(path)

    def free(self) -> None:
        self._lock.free()


class Single(Directory):
    """One checkpoint, at a path of the user's choice."""

    def __init__(self, final: Path) -> None:
        super().__init__(final.parent, None, None)
        self._final = final

    def place(self, step: int, planned: Set[str]) -> CheckpointFolder:
        if os.path.lexists(self._final):
            raise CheckpointError(
                f"{self._final} already exists; choose another path, or delete it first", path=self._final
            )
        self.path.mkdir(parents=True, exist_ok=True)
        return _made(self._final, 1)

    def tidy(self, newest: Path) -> None:
        """Do nothing: no files beside it are ours."""


def sees(directory: Path, process: int) -> bool:
    """Check that a directory that process 0 has made is here too."""
    deadline = time.monotonic() + SHARED_SECONDS
    while not directory.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"process 0 has made {directory}, and process {process} on {socket.gethostname()} does not "
                f"see it; all processes must share the directory: use a file system that all hosts mount",
                path=directory,
            )
        time.sleep(0.05)
    return True
