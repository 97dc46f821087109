"""One save, from the copy to the rename; everything here runs on a background thread.

Each process writes its file and then a small note beside it; process 0 waits for all notes, writes the index and the
manifest, and gives the directory its name. All of that goes through the directory, which all processes share, and not
through the process group: training uses the group meanwhile, and a process that dies can leave nothing half done in
it. Until the rename the directory's name begins with a dot, and whoever looks for checkpoints does not see it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.checkpoint.disk.manifest import INDEX, LONGEST, MANIFEST, seal
from penstock.checkpoint.files.tensors import Body, TensorEntry, streamed, sync_directory, write_file
from penstock.checkpoint.processes import Processes
from penstock.checkpoint.save.write_plan import WritePlan, file_of
from penstock.errors import CheckpointError
from penstock.parallel.group.agreement import in_words
from penstock.reading import read_json, read_text
from penstock.writing import create

logger = logging.getLogger("penstock.checkpoint")
BEAT = (0.002, 0.1)  # seconds between looks: the first, and the longest
PROGRESS_BEAT = 1.0  # seconds between looks at every file: of a thousand processes each would look at a thousand files
PATIENCE = 600.0  # seconds without any progress of another process
LAST_PATIENCE = 10.0  # the same, once the program has ended


class GivenUp(CheckpointError):
    """This save was given up because of another process."""


@dataclass
class Saving:
    """What one process knows of a save that is under way."""

    step: int
    temporary: Path
    final: Path
    processes: Processes
    plan: WritePlan
    plain: Mapping[str, Any]
    document: Mapping[str, Any]  # The manifest, but for its files.
    finished: Callable[[Path], None]  # Called on process 0, after the rename.
    body: Body | None = None
    _pieces: Callable[[], Iterable[memoryview]] = list
    _ended: BaseException | None = None  # why this process no longer wants it

    def copy(self, body: Body, value_of: Callable[[TensorEntry], Tensor]) -> None:
        """Take the values; on the thread that trains. All that comes later may then happen beside it."""
        self.body = body
        try:
            body.fill(self.plan.layout, value_of)
        except BaseException as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise
        self._pieces = lambda: [body.view(self.plan.layout.bytes)]

    def read_from(self, value_of: Callable[[TensorEntry], Tensor]) -> None:
        """Take the values while writing, without a copy of all of them."""

        def pieces() -> Iterator[memoryview]:
            for piece in streamed(self.plan.layout, value_of):
                yield piece
                self._check()

        self._pieces = pieces

    def give_up(self, reason: BaseException) -> None:
        """End it, from another thread: what this process has not written yet may change from now on."""
        self._ended = reason

    def run(self) -> Path:
        """Write this process's part, and see the save through to its end."""
        try:
            self._write_part()
            if self.processes.number == 0:
                self._finish(self._notes())
                try:  # what is saved is saved, whether or not older ones can be deleted
                    self.processes.clock.paced(self.finished)(self.final)
                except OSError as error:
                    logger.warning("older checkpoints could not be deleted: %s", error)
            else:
                self._await_end()
        except OSError as error:
            if self.processes.number != 0 and not self.temporary.exists():
                raise GivenUp(f"step {self.step} was not saved: process 0 gave up", path=self.final) from error
            self._abandon(str(error))
            raise CheckpointError(
                f"step {self.step} could not be saved to {self.final}: {error}; earlier checkpoints are unchanged",
                path=self.final,
            ) from error
        except BaseException as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise
        return self.final

    def _write_part(self) -> None:
        layout = self.plan.layout
        name = file_of(self.processes.number)
        write = self.processes.clock.paced(write_file)
        size, crc = write(self.temporary / name, chain([layout.header], self._pieces()))
        note = json.dumps({"file": [name, size, crc], "plain": self.plain}).encode()
        partial = self.temporary / f".note-{self.processes.number:05d}"
        write(partial, [note])
        partial.rename(self.temporary / f"note-{self.processes.number:05d}.json")

    # -- process 0

    def _notes(self) -> list[dict[str, Any]]:
        wanted = [self.temporary / f"note-{number:05d}.json" for number in range(self.processes.count)]

        def missing() -> list[int]:
            return [number for number, path in enumerate(wanted) if not path.exists()]

        self._wait(lambda: not missing(), lambda: f"processes {missing()} have written nothing more")
        return [read_json(path, most=LONGEST) for path in wanted]

    def _finish(self, notes: Sequence[Mapping[str, Any]]) -> None:
        files = {name: [size, crc] for name, size, crc in (note["file"] for note in notes)}
        index = {"tensors": self.plan.tensors, "processes": [note["plain"] for note in notes]}
        write = self.processes.clock.paced(write_file)
        files[INDEX] = list(write(self.temporary / INDEX, [json.dumps(index).encode()]))
        write(self.temporary / MANIFEST, [seal({**self.document, "files": files})])
        for number in range(self.processes.count):
            (self.temporary / f"note-{number:05d}.json").unlink()
        sync_directory(self.temporary)
        self.temporary.rename(self.final)
        sync_directory(self.final.parent)

    # -- the others

    def _await_end(self) -> None:
        self._wait(lambda: not self.temporary.exists(), lambda: "process 0 has not finished the checkpoint")
        if not self.final.exists():
            raise GivenUp(f"step {self.step} was not saved: another process could not write its part", path=self.final)

    # -- both

    def _wait(self, ready: Callable[[], bool], late: Callable[[], str]) -> None:
        pause, seen, since = BEAT[0], None, self.processes.clock.now()
        looked = since
        while not ready():
            self._check()
            self._look_for_failures()
            self.processes.clock.sleep(pause)
            pause = min(2 * pause, BEAT[1])
            if self.processes.clock.now() - looked >= PROGRESS_BEAT:
                looked, now = self.processes.clock.now(), _progress(self.temporary)
                if now != seen:
                    seen, since = now, looked
            patience = PATIENCE if threading.main_thread().is_alive() else LAST_PATIENCE
            if self.processes.clock.now() - since > patience:
                raise CheckpointError(
                    f"step {self.step} was not saved: for {patience:g} s, {late()} in {self.temporary}", path=self.final
                )

    def _check(self) -> None:
        loss = self._ended or self.processes.lost()
        if loss is not None:
            raise GivenUp(f"step {self.step} was not saved: {in_words(loss)}", path=self.final)

    def _look_for_failures(self) -> None:
        with suppress(FileNotFoundError):
            for path in self.temporary.glob("failed-*"):
                reason = read_text(path) or "for a reason that it could not write down"
                raise GivenUp(
                    f"step {self.step} was not saved: process {int(path.name[-5:])} failed: {reason}", path=self.final
                )

    def _abandon(self, why: str) -> None:
        with suppress(OSError):  # the error that led here is the one to be raised
            if self.processes.number == 0:
                remove(self.temporary)
            else:
                with create(self.temporary / f"failed-{self.processes.number:05d}") as file:
                    file.write(why)


def _progress(directory: Path) -> list[tuple[str, int]]:
    """Return names and sizes of the files so far, which change while anybody writes."""
    found = []
    with suppress(FileNotFoundError):
        for entry in os.scandir(directory):
            with suppress(FileNotFoundError):
                found.append((entry.name, entry.stat().st_size))
    return sorted(found)


def remove(directory: Path) -> None:
    """Delete a directory so that no reader sees a part of it: it loses its name first."""
    trash = directory.with_name(f".trash-{directory.name.lstrip('.')}-{os.getpid()}-{time.monotonic_ns()}")
    with suppress(FileNotFoundError):
        directory.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)
