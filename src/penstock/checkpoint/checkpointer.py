"""`Checkpointer`: the checkpoints of a run, saved while it goes on and loaded under any layout.

`save` gathers and copies while training stands still, and leaves the rest to a background thread. Two copies may exist
at once: one that is being written and one that waits, so a save is held up only by the one before the last. What goes
wrong in the background is raised by the next `save` or `wait`, on every process alike.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from penstock.checkpoint.disk.directory import CheckpointFolder, Directory, sees
from penstock.checkpoint.disk.manifest import find_newest
from penstock.checkpoint.files.tensors import Body
from penstock.checkpoint.load.loading import Loaded, SkippedLog, load_into
from penstock.checkpoint.named_tensors import Given, Saved, collect, document_of
from penstock.checkpoint.processes import Processes
from penstock.checkpoint.save.saving import GivenUp, Saving, remove
from penstock.checkpoint.save.write_plan import Planner
from penstock.errors import CheckpointError, UsageError
from penstock.rules import is_count

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

AT_ONCE = 2  # copies: one that is being written, one that waits
BEAT = 1.0  # seconds: how long a process waits for its own files before it looks for the others


class Checkpointer:
    """Saves and loads the checkpoints of one run, in a directory that all its processes share.

    ::

        checkpoints = Checkpointer("checkpoints")
        checkpoints.save(step, pipe, optimizer)
        step = checkpoints.load(pipe, optimizer).step + 1

    Args:
        directory: Where the checkpoints are, one folder per saved step.
        keep_last: How many of the newest checkpoints are kept. `None`: all.
        keep_every: Checkpoints of steps that are multiples of this are kept as well.
        keep_best: Whether the checkpoint with the lowest `score` is kept as well.
        async_save: Whether `save` returns once everything is copied, while a thread writes. With `False`, it returns
            when the checkpoint is complete.
        leave_out: A function of the name of a parameter: whether it is not saved, and stays as it is when a checkpoint
            is loaded. For frozen parameters that come from elsewhere, such as those beside adapters.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_best: bool = False,
        async_save: bool = True,
        leave_out: Callable[[str], bool] | None = None,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and not (is_count(value) and value >= 1):
                raise UsageError(f"{name}={value!r}: pass a whole number of at least 1, or None to turn this rule off")
        self.directory = Path(directory).absolute()
        self.async_save, self._leave_out = async_save, leave_out
        self.files = Directory(self.directory, keep_last, keep_every, keep_best)
        self._planner = Planner()
        self._writer: Any = None
        self._under_way: list[tuple[Saving, Any]] = []
        self._failed: BaseException | None = None  # what went wrong in the background, until it is raised
        self._bodies: list[Body] = []  # free ones
        self._pipe: weakref.ref[Pipeline] | None = None  # The pipeline of the last save.
        self._seen = False  # every process has seen a directory that process 0 made
        self._closed = False
        self._log_skipped = SkippedLog()

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
        averages: Mapping[str, Tensor] | None = None,
        extra: Any = None,
        config: Any = None,
        score: float | None = None,
        while_best: bool = False,
    ) -> None:
        """Save the run as it is after `step` steps. Call it on every process.

        Raises what went wrong with an earlier save, and then does not begin this one: call it again.

        Args:
            step: The number of completed steps.
            pipe: The pipeline: its parameters, buffers and position in its random numbers.
            optimizer: One optimizer, or a list.
            scheduler: A learning rate scheduler, or anything with `state_dict()` and `load_state_dict()`.
            scaler: A `GradScaler`.
            data: Anything with `state_dict()` and `load_state_dict()`, such as a data loader that can resume.
            averages: Averages of parameters, by parameter name, each laid out as its parameter is.
            extra: Plain values of yours: numbers, text, lists, dicts and tensors.
            config: Plain values that describe the run.
            score: A figure by which checkpoints are compared, such as a validation loss; the lowest is the best.
            while_best: Whether this checkpoint stays only while its score is the lowest, beside those of `keep_last`.
        """
        if not is_count(step) or step < 0:
            raise UsageError(f"step={step!r}: pass the number of completed steps, a whole number of at least 0")
        if self._closed:
            raise UsageError("this Checkpointer is closed; make a new one")
        processes = Processes(pipe, "save()")
        pipe.settle()
        self._pipe = weakref.ref(pipe)
        if score is not None and not math.isfinite(score):
            raise UsageError(f"score={score!r}: pass a finite number, or None for a checkpoint that is not compared")
        given = Given(optimizer, scheduler, scaler, data, extra, config, averages, score, while_best, self._leave_out)
        while (saving := self._agree(processes, step, pipe, given)) is None:
            self._settle(processes, leave=AT_ONCE - 1)
        if self.async_save:
            saving.copy(self._bodies.pop() if self._bodies else Body(), self._planner.value_of)
            self._begin(saving)
        else:
            saving.read_from(self._planner.value_of)
            try:
                self._begin(saving)
                self._settle(processes)
            except BaseException as error:  # an interrupt, or a loss: what the thread still reads may change now
                saving.give_up(error)
                self._collect(0)
                self._failed = None
                raise
        self._planner.forget()

    def _begin(self, saving: Saving) -> None:
        """Write on a thread, so that this one hears of a process that is lost meanwhile."""
        if self._writer is None:
            self._writer = saving.processes.clock.background("penstock-checkpoint")
        self._under_way.append((saving, self._writer.submit(saving.run)))

    def _place(self, step: int) -> CheckpointFolder:
        try:
            return self.files.place(step, {saving.final.name for saving, _ in self._under_way})
        except OSError as error:
            raise CheckpointError(
                f"step {step} could not be saved in {self.directory}: {error}; earlier checkpoints are unchanged",
                path=self.directory,
            ) from error

    def _agree(self, processes: Processes, step: int, pipe: Pipeline, given: Given) -> Saving | None:
        """Agree between all processes on what is saved, by whom and where. None where earlier saves must be seen to
        first.
        """
        made: list[CheckpointFolder] = []

        def look() -> tuple[tuple[Saved, Any], Any]:
            if not self._collect(AT_ONCE - 1, 0.0) or self._failed is not None:
                return (Saved(), {}), (False, step, "", None)
            saved = collect(pipe, given, processes.number)
            document = document_of(step, pipe, given, processes.count)
            changed = self._planner.look(saved.tensors)
            if processes.first:
                made.append(self._place(step))
            return (saved, document), (True, step, changed, made[0] if made else None)

        try:
            (saved, document), answers = processes.on_all(look, self.directory)
            if not all(ready for ready, _, _, _ in answers):
                for place in made:
                    remove(place.temporary)
                return None
            steps = [each for _, each, _, _ in answers]
            if len(set(steps)) > 1:
                raise UsageError(f"the processes were given different steps to save: {steps}")
            where = CheckpointFolder(*answers[0][3])
            if not self._seen:
                processes.on_all(lambda: (None, sees(where.temporary, processes.number)), where.final)
                self._seen = True
            plan = self._planner.agree(any(new for _, _, new, _ in answers), processes.number, processes.exchange)
        except BaseException:
            for place in made:
                remove(place.temporary)
            raise
        document = {**document, "serial": where.serial}
        return Saving(step, where.temporary, where.final, processes, plan, saved.plain, document, self.files.tidy)

    def _settle(self, processes: Processes, leave: int = 0) -> None:
        """Wait until at most `leave` saves are under way; raise what went wrong in any, on every process alike.

        The processes keep in touch meanwhile, so that one that dies or stalls does not keep the others waiting.
        """
        settled, beat = False, 0.0
        while not settled:
            done, beat = self._collect(leave, beat), BEAT
            mine = self._failed
            answers = processes.exchange((done, None if mine is None else (str(mine), isinstance(mine, GivenUp))))
            settled = all(each for each, _ in answers)
        causes = [(said[1], number, said[0]) for number, (_, said) in enumerate(answers) if said is not None]
        if not causes:
            return
        self._collect(0)  # the same save fails everywhere, here perhaps a moment later: one error is enough
        self._failed = None
        if mine is not None and not isinstance(mine, GivenUp):
            raise mine
        _, number, text = min(causes)  # a cause before those who gave up because of it
        raise CheckpointError(f"process {number}: {text}", path=self.directory) from mine

    def _collect(self, leave: int, seconds: float | None = None) -> bool:
        """Return whether at most `leave` saves are under way, after so long a wait; an error of the others is kept."""
        while self._under_way and (len(self._under_way) > leave or self._under_way[0][1].done()):
            saving, future = self._under_way[0]
            try:
                error = future.exception(seconds)
            except TimeoutError:
                return False
            self._under_way.pop(0)
            if saving.body is not None:
                self._bodies.append(saving.body)
            self._failed = self._failed or error
        return True

    def wait(self) -> None:
        """Wait until everything that was saved is complete, on every process; raises what went wrong."""
        pipe = None if self._pipe is None else self._pipe()
        if pipe is not None and not pipe.closed:
            self._settle(Processes(pipe, "wait()"))
        else:
            self._collect(0)
            self._raise_own()

    def _raise_own(self) -> None:
        error, self._failed = self._failed, None
        if error is not None:
            raise error

    # -- finding and loading

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint, or `None`. Damaged ones are skipped and logged once."""
        path, problems = find_newest(self.directory)
        self._log_skipped(problems)
        return path

    def load(
        self,
        pipe: Pipeline,
        optimizer: Any = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        averages: Mapping[str, Tensor] | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> Loaded:
        """Load a checkpoint into a pipeline of any layout. Call it on every process.

        Args:
            pipe: The pipeline to load into.
            optimizer: One optimizer, or a list, as it was saved.
            scheduler: What was saved as `scheduler`.
            scaler: What was saved as `scaler`.
            data: What was saved as `data`.
            averages: Tensors to fill with what was saved as `averages`; `loaded.averages` names those that were filled.
            path: The checkpoint to load. By default, the newest complete one.

        Returns:
            A `Loaded`; the next step to train is `loaded.step + 1`.
        """
        given = Given(optimizer, scheduler, scaler, data, averages=averages, leave_out=self._leave_out)
        if path is None:
            return load_into(pipe, given, self.directory, self._log_skipped, newest=True)
        return load_into(pipe, given, Path(path), self._log_skipped, newest=False)

    def close(self) -> None:
        """Wait for saves under way in this process, and release the directory; raises what went wrong here."""
        self._closed = True
        try:
            self._collect(0)
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None
            self._bodies = []
            self.files.free()
        self._raise_own()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        try:
            self.close()
        except CheckpointError as own:
            if error is None:
                raise
            error.add_note(f"a save that was under way failed as well: {own}")  # what came first stays the error
