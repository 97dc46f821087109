"""The face: `Checkpointer` for a run, `save` and `load` for a single checkpoint.

`save` gathers and copies while training stands still, and leaves the rest to a background thread. Two copies may exist
at once: one that is being written and one that waits, so a save is held up only by the one before the last. What goes
wrong in the background is raised by the next `save` or `wait`, on every process alike.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import CheckpointError, UsageError
from penstock.train.checkpoint.body import Body
from penstock.train.checkpoint.collecting import Given, collect, document_of
from penstock.train.checkpoint.loading import Loaded, load_into, say
from penstock.train.checkpoint.lock import Lock
from penstock.train.checkpoint.manifest import MANIFEST, checkpoints_in, find_newest, folder_name, newest_first
from penstock.train.checkpoint.plan import Planner
from penstock.train.checkpoint.processes import Processes
from penstock.train.checkpoint.saving import GivenUp, Saving, remove
from penstock.train.checkpoint.state import Saved

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

__all__ = ["Checkpointer", "Loaded", "load", "save"]

AT_ONCE = 2  # copies: one that is being written, one that waits


class Place(NamedTuple):
    """Where a checkpoint is written, what it will be called, and its number."""

    temporary: Path
    final: Path
    serial: int


class Checkpointer:
    """Checkpoints of one run in a directory that all its processes share."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        async_save: bool = True,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name}={value!r}: pass a whole number from 1 on, or None for no such limit")
        self.directory = Path(directory)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.async_save = async_save
        self._lock = Lock(self.directory)
        self._planner = Planner()
        self._serial = 0
        self._writer: ThreadPoolExecutor | None = None
        self._under_way: list[tuple[Saving, Future[Path]]] = []
        self._bodies: list[Body] = []  # free ones
        self._processes: Processes | None = None
        self._closed = False
        self._managed = True  # this object names the checkpoints of the directory, and deletes old ones

    # -- saving

    def save(
        self,
        step: int,
        pipe: Pipeline,
        optimizer: Any = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        extra: Any = None,
        config: Any = None,
    ) -> None:
        """Save what the run is after `step`. On every process; returns once all is copied."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise UsageError(f"step={step!r}: pass the number of steps that were done, a whole number from 0 on")
        given = Given(optimizer, scheduler, scaler, data, extra, config)
        self._start(step, pipe, given, lambda: self._next_place(step))
        if not self.async_save:
            self.wait()

    def _start(self, step: int, pipe: Pipeline, given: Given, place: Callable[[], Place]) -> None:
        if self._closed:
            raise UsageError("this Checkpointer is closed; make a new one")
        self._processes = processes = Processes(pipe)
        self._settle(leave=AT_ONCE - 1)

        def look() -> tuple[Saved, Any]:
            saved = collect(pipe, given, processes.number)
            changed = self._planner.look(saved.tensors)
            return saved, (step, changed, place() if processes.first else None)

        saved, told = processes.together(look, self.directory)
        if len({each for each, _, _ in told}) > 1:
            raise UsageError(f"the processes were given different steps to save: {[each for each, _, _ in told]}")
        where: Place = told[0][2]
        plan = self._planner.agree(any(changed for _, changed, _ in told), processes.number, processes.exchange)
        saving = Saving(
            step=step,
            temporary=where.temporary,
            final=where.final,
            number=processes.number,
            count=processes.count,
            plan=plan,
            body=self._bodies.pop() if self._bodies else Body(),
            plain=saved.plain,
            document=document_of(step, pipe, given.config, processes.count, where.serial),
            lost=processes.lost,
            finished=self._finished if self._managed else None,
        )
        saving.copy(self._planner.value_of)
        self._planner.forget()
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="penstock-checkpoint")
        self._under_way.append((saving, self._writer.submit(saving.run)))

    def _next_place(self, step: int) -> Place:
        """On process 0: where the next checkpoint goes. Its hidden directory is made here."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._lock.take():
            for path in self.directory.glob(".*"):  # left by runs that were killed: nobody else writes here now
                if path.is_dir() and path.name.startswith((".step-", ".trash-")):
                    remove(path)
            serials = [manifest.serial for _, manifest in newest_first(self.directory)[0]]
            self._serial = max(serials, default=0)
        taken = {named.path.name for named in checkpoints_in(self.directory)}
        taken |= {saving.final.name for saving, _ in self._under_way}
        name = next(name for again in count() if (name := folder_name(step, again)) not in taken)
        self._serial += 1
        return _place(self.directory / name, self._serial)

    def _finished(self, path: Path) -> None:
        """On process 0, when a checkpoint has its name: delete what is not to be kept."""
        whole = newest_first(self.directory)[0]
        newest = {step: found for found, step in reversed([(found, each.step) for found, each in whole])}
        for number, (found, manifest) in enumerate(whole):
            stale = newest[manifest.step] != found  # the same step was saved again since
            kept = self.keep_every is not None and manifest.step % self.keep_every == 0 and not stale
            late = self.keep_last is not None and number >= self.keep_last
            if found != path and not kept and (stale or late):
                remove(found)

    def _settle(self, leave: int = 0) -> None:
        """Wait until at most `leave` saves are under way; raise what went wrong in any, on every process alike."""
        errors: list[Exception] = []
        while self._under_way and (len(self._under_way) > leave or self._under_way[0][1].done()):
            saving, future = self._under_way.pop(0)
            error = future.exception()
            self._bodies.append(saving.body)
            if isinstance(error, Exception):
                errors.append(error)
        mine = errors[0] if errors else None
        if self._processes is None:
            return
        told = self._processes.exchange(None if mine is None else (str(mine), isinstance(mine, GivenUp)))
        roots = [(number, each[0]) for number, each in enumerate(told) if each is not None and not each[1]]
        if mine is not None and not isinstance(mine, GivenUp):
            raise mine
        if roots:
            raise CheckpointError(f"process {roots[0][0]}: {roots[0][1]}", path=self.directory) from mine
        if mine is not None:
            raise mine
        others = [(number, each[0]) for number, each in enumerate(told) if each is not None]
        if others:
            raise CheckpointError(f"process {others[0][0]}: {others[0][1]}", path=self.directory)

    def wait(self) -> None:
        """Until all that was saved is whole, on every process; raises what went wrong."""
        self._settle()

    # -- finding and loading

    def latest(self) -> Path | None:
        """The newest whole checkpoint (by manifest and sizes); damaged ones are passed over, and logged."""
        path, problems = find_newest(self.directory)
        say(problems)
        return path

    def load(
        self,
        pipe: Pipeline,
        optimizer: Any = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        path: str | os.PathLike[str] | None = None,
    ) -> Loaded:
        """Into a pipeline of any layout: the newest whole checkpoint, or the one at `path`. On every process."""
        given = Given(optimizer, scheduler, scaler, data)
        if path is None:
            return load_into(pipe, given, self.directory, newest=True)
        return load_into(pipe, given, Path(path), newest=False)

    def close(self) -> None:
        """Wait for what is under way here, and let other runs write to the directory; raises what went wrong here."""
        self._closed = True
        errors = []
        for _, future in self._under_way:
            error = future.exception()
            if error is not None:
                errors.append(error)
        self._under_way = []
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None
        self._bodies = []
        self._lock.free()
        if errors:
            raise errors[0]

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _place(final: Path, serial: int) -> Place:
    temporary = final.with_name(f".{final.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    return Place(temporary, final, serial)


def save(
    path: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: Any = None,
    *,
    step: int = 0,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    extra: Any = None,
    config: Any = None,
) -> None:
    """One checkpoint, at exactly this path, whole when this returns. On every process."""
    final = Path(path).absolute()

    def place() -> Place:
        if final.exists():
            raise CheckpointError(f"{final} is there already; choose another path, or delete it first", path=final)
        final.parent.mkdir(parents=True, exist_ok=True)
        return _place(final, 1)

    with Checkpointer(final.parent, keep_last=None, async_save=False) as writer:
        writer._managed = False
        writer._start(step, pipe, Given(optimizer, scheduler, scaler, data, extra, config), place)
        writer.wait()


def load(
    path: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: Any = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
) -> Loaded:
    """A checkpoint, or the newest whole one of a directory that has several, into a pipeline of any layout."""
    found = Path(path)
    newest = not (found / MANIFEST).exists() and bool(checkpoints_in(found))
    return load_into(pipe, Given(optimizer, scheduler, scaler, data), found, newest=newest)
