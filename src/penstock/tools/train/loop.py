"""The training loop of one rank: steps, evaluations, saves, and the reasons to end.

Every rank runs this same code on the same numbers. What only one can do, such as writing lines, rank 0 does; what
they must decide together, such as stopping, they exchange once per step.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from typing import Any

from penstock.checkpoint.checkpointer import Checkpointer
from penstock.checkpoint.processes import Processes
from penstock.errors import ModelError
from penstock.tools.train.config.read import to_document
from penstock.tools.train.config.settings import Evaluation
from penstock.tools.train.evaluate import validation_losses
from penstock.tools.train.launch.stopping import Stop
from penstock.tools.train.models.huggingface import base_mark
from penstock.tools.train.run.memory import COUNTED, Memory, memory_document, memory_table
from penstock.tools.train.run.progress import Reporter, memory_now
from penstock.tools.train.run.recordings import Recordings
from penstock.tools.train.run.run_folder import RunFolder, write_json
from penstock.tools.train.steps import MOST, RunState, Trained, TrainingSteps, stretch


@dataclass(frozen=True)
class Ending:
    """How a run ended on this rank."""

    step: int
    loss: float | None
    validation: float | None
    stopped: bool  # asked to, before the last step
    early: str = ""  # why it ended before the last step by itself


@dataclass
class EarlyStopping:
    """Counts evaluations without a lower loss. All ranks see the same losses, so all come to the same end."""

    options: Evaluation
    lowest: float = math.inf
    lowest_step: int = 0
    to_beat: float = math.inf  # the last loss that was lower by min_delta
    waited: int = 0  # evaluations since then

    def see(self, step: int, loss: float) -> bool:
        """Take the loss of an evaluation; returns whether it is the lowest so far."""
        if loss < self.to_beat - self.options.min_delta:
            self.to_beat, self.waited = loss, 0
        else:  # NaN as well
            self.waited += 1
        if not loss < self.lowest:
            return False
        self.lowest, self.lowest_step = loss, step
        return True

    @property
    def over(self) -> bool:
        """Whether the run ends here."""
        return self.options.patience is not None and self.waited >= self.options.patience

    @property
    def words(self) -> str:
        """Why it ends."""
        less = f" by {self.options.min_delta:g}" if self.options.min_delta else ""
        return (
            f"{self.waited} evaluations without a validation loss{less} below {self.to_beat:.4f}; the lowest is "
            f"{self.lowest:.4f}, of step {self.lowest_step} (evaluation.patience is {self.options.patience})"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {name: getattr(self, name) for name in ("lowest", "lowest_step", "to_beat", "waited")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        for name, value in self.state_dict().items():
            setattr(self, name, type(value)(state.get(name, value)))


class Trainer:
    """The training loop of one rank, with all that it needs."""

    def __init__(self, state: RunState, checkpointer: Checkpointer, folder: RunFolder, reporter: Reporter) -> None:
        self.config, self.state = state.config, state
        self.checkpointer, self.folder, self.reporter = checkpointer, folder, reporter
        self.processes = Processes(state.pipe, "penstock train")
        self.steps = TrainingSteps(state, reporter.progress.write)
        self.step = 0  # steps that are done
        self.loss: float | None = None
        self.validation: float | None = None
        self.stopping = EarlyStopping(self.config.evaluation)
        self._score: float | None = None  # the validation loss of this step, if it was evaluated
        self._saved: int | None = None
        self._base = base_mark(self.config)  # what checkpoints leave out
        self._memory_by_rank: list[int] = []  # What all ranks have reported last.

    def run(self, start: int, stop: Stop) -> Ending:
        """Train from step `start` to the last one, or until asked to stop."""
        self.step = self._saved = start
        recordings = Recordings(self.config, self.state.pipe, self.folder, start, self.reporter.metrics is not None)
        self.reporter.begin()
        asked = False
        try:
            while not self._ends and not asked:
                recordings.begin(self.step + 1)
                trained = self._train(start, recordings)
                asked, self._memory_by_rank = self._agree(stop.asked)
                recorded = recordings.end(self.step, asked)
                validation = self._evaluate() if self._evaluates(asked) else None
                best = self._seen(validation)
                self.loss = trained.loss
                self.reporter.report(self.step, trained, self._memory_by_rank, recorded=recorded, validation=validation)
                due = self._due(self.config.checkpoint.every) or self._ends
                if not asked and (best or due):
                    self.save(while_best=not due)
        finally:
            recordings.close()
        if self._saved != self.step or not start:
            self.save()
        self.checkpointer.wait()
        if self.step > start:
            self._report_memory()
        unfinished = self.step < self.config.training.steps
        early = self.stopping.words if unfinished and self.stopping.over else ""
        return Ending(self.step, self.loss, self.validation, unfinished and not early, early)

    def go_on(self, extra: dict[str, Any]) -> None:
        """Take what was saved beside the weights; of a run from its beginning, nothing."""
        self.steps.skips = int(extra.get("skips", 0))
        if "stopping" in extra:
            self.stopping.load_state_dict(extra["stopping"])
        if self.state.average is not None:
            self.state.average.updates = int(extra.get("updates", 0))

    @property
    def _ends(self) -> bool:
        return self.step >= self.config.training.steps or self.stopping.over

    def save(self, while_best: bool = False) -> None:
        """Save the run as it is; `while_best`: for its validation loss, and not because it is time to."""
        if self._saved == self.step and self.step:
            return
        average = self.state.average
        self.checkpointer.save(
            self.step,
            self.state.pipe,
            self.state.optimizer,
            **self.state.saved,
            extra={
                "skips": self.steps.skips,
                "base": self._base,
                "stopping": self.stopping.state_dict(),
                "updates": 0 if average is None else average.updates,
            },
            config=to_document(self.config),
            score=self._score,
            while_best=while_best,
        )
        self._saved = self.step

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _evaluates(self, asked: bool) -> bool:
        every = self.config.evaluation.every
        return not asked and (self._due(every) or (every > 0 and self.step == self.config.training.steps))

    def _train(self, start: int, recordings: Recordings) -> Trained:
        """Train one step, or some that overlap: all but the last are reported here, and that one is returned."""
        ahead = stretch(self.config, self.step, recordings.unrecorded(self.step + 1, MOST))
        # Memory is counted in the first steps, which end together.
        overlap = ahead > 1 and self.step - start >= COUNTED
        last: Trained | None = None
        for trained in self.steps.train_ahead(self.step, ahead) if overlap else [self.steps.train(self.step)]:
            if last is not None:
                self.reporter.report(self.step, last, self._memory_by_rank)
            last = trained
            self.reporter.time(trained)
            self.step += 1
        assert last is not None
        return last

    # -- between steps

    def _agree(self, asked: bool) -> tuple[bool, list[int]]:
        """Return whether any rank was asked to stop, and every rank's memory; all must have the same batch."""
        answers = self.processes.exchange((asked, memory_now(), self.steps.mark))
        other = next((rank for rank, (_, _, mark) in enumerate(answers) if mark != answers[0][2]), None)
        if other is not None:
            raise ModelError(
                f"{self.state.data.words}: in step {self.step}, rank {other} was given another batch than rank 0, so "
                f"that inputs and targets are not of the same rows; draw from generators with a seed of their own, or "
                f"return an object with batch(number)"
            )
        return any(asked for asked, _, _ in answers), [memory for _, memory, _ in answers]

    def _report_memory(self) -> None:
        """Report what each process holds, by kind: in the folder of the run, and as a table."""
        rows = [Memory(*each) for each in self.processes.exchange(astuple(self.steps.memory.memory()))]
        if self.reporter.metrics is not None:  # This rank writes.
            write_json(self.folder.memory, memory_document(rows))
        in_threads = len(rows) == 1 and self.config.pipeline.ranks > 1
        self.reporter.progress.write(f"\n{memory_table(rows, ['all'] if in_threads else None)}")

    def _evaluate(self) -> float | None:
        """Compute the mean loss on the validation batches, with the average of the weights where there is one."""
        average = self.state.average
        with nullcontext() if average is None else average.in_place():
            _, self.validation = validation_losses(
                self.state.pipe, self.state.data, self.config.evaluation.batches, self.steps.mine
            )
        return self.validation

    def _seen(self, validation: float | None) -> bool:
        """Return whether the weights of this step are the best so far, and are to be saved for that."""
        self._score = validation if validation is not None and math.isfinite(validation) else None
        lowest = validation is not None and self.stopping.see(self.step, validation)
        return lowest and self.config.checkpoint.keep_best
