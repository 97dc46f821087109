"""The training loop of one rank: steps, evaluations, saves, and the reasons to end.

Every rank runs this same code on the same numbers. What only one can do, such as writing lines, rank 0 does; what
they must decide together, such as stopping, they tell each other once per step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from penstock.checkpoint.checkpointer import Checkpointer
from penstock.checkpoint.processes import Processes
from penstock.errors import ModelError
from penstock.optim.scaler import GradScaler
from penstock.pipeline import Pipeline, StepResult
from penstock.train.config.read import to_document
from penstock.train.config.settings import TrainConfig
from penstock.train.data.batch import DataBatch, DataBatches
from penstock.train.launch.stopping import Stop
from penstock.train.loss import MeanLoss, shares_of
from penstock.train.models.huggingface import base_mark
from penstock.train.overlapped import MOST, Trained, stretch, train_overlapped
from penstock.train.run.memory import COUNTED, Memory, MemoryWatch, memory_document, memory_table
from penstock.train.run.metrics import Metrics
from penstock.train.run.progress import Pace, Progress, Reading, memory_now
from penstock.train.run.recordings import Recordings
from penstock.train.run.run_folder import RunFolder, write_json
from penstock.train.updates.early_stopping import EarlyStopping
from penstock.train.updates.ema import WeightAverage
from penstock.train.updates.nonfinite import NonFinite, find_culprit
from penstock.view.recorded import Recorded

OVERFLOWS = 40  # in fp16: halvings of the scale, in a row, from 2^16 to where nothing is left of a gradient


@dataclass(frozen=True)
class Ending:
    """How a run ended on this rank."""

    step: int
    loss: float | None
    validation: float | None
    stopped: bool  # asked to, before the last step
    early: str = ""  # why it ended before the last step by itself


class Trainer:
    """The training loop of one rank, with all that it needs."""

    def __init__(
        self,
        config: TrainConfig,
        pipe: Pipeline,
        optimizer: torch.optim.Optimizer,
        rate: LambdaLR,
        data: DataBatches,
        checkpointer: Checkpointer,
        scaler: GradScaler | None,
        folder: RunFolder,
        metrics: Metrics | None,
        progress: Progress,
        average: WeightAverage | None = None,
    ) -> None:
        self.config = config
        self.pipe, self.optimizer, self.rate, self.data = pipe, optimizer, rate, data
        self.checkpointer, self.scaler, self.folder = checkpointer, scaler, folder
        self.processes = Processes(pipe, "penstock train")
        self.metrics, self.progress = metrics, progress
        self.step = 0  # steps that are done
        self.loss: float | None = None
        self.validation: float | None = None
        self.skips = 0  # steps in a row that were left out
        self.average = average
        self.stopping = EarlyStopping(config.evaluation)
        self.utilisation: float | None = None  # MFU for one token per second, where it is known
        self._idle: float | None = None
        self._score: float | None = None  # the validation loss of this step, if it was evaluated
        self._saved: int | None = None
        self._memory = MemoryWatch(pipe, optimizer, average)
        self._base = base_mark(config)  # what checkpoints leave out
        self._mark = 0  # a checksum of what this step was given
        self._memory_by_rank: list[int] = []  # as all ranks last said

    def run(self, start: int, stop: Stop) -> Ending:
        """Train from step `start` to the last one, or until asked to stop."""
        self.step = self._saved = start
        pace, steps = Pace(), self.config.training.steps
        recordings = Recordings(self.config, self.pipe, self.folder, start, self.metrics is not None)
        asked = False
        try:
            while not self._ends and not asked:
                recordings.begin(self.step + 1)
                ahead = stretch(self.config, self.step, recordings.unrecorded(self.step + 1, MOST))
                if ahead > 1 and self.step - start >= COUNTED:  # memory is counted in steps that end together
                    loss, norm, lr, tokens = self._train_ahead(ahead, pace)
                else:
                    with self._memory.step():
                        loss, norm, lr, tokens = self._train()
                pace.step(tokens)
                self.step += 1
                asked, memory = self._tell(stop.asked)
                self._memory_by_rank = memory
                recorded = recordings.end(self.step, asked)
                validation = self._evaluate() if self._evaluates(asked) else None
                best = self._seen(validation)
                self._report(loss, norm, lr, pace, memory, recorded, validation)
                due = self._due(self.config.checkpoint.every) or self._ends
                if not asked and (best or due):
                    self.save(while_best=not due)
        finally:
            recordings.close()
        recordings.finish()
        if self._saved != self.step or not start:
            self.save()
        self.checkpointer.wait()
        if self.step > start:
            self._tell_memory()
        early = self.stopping.words if self.step < steps and self.stopping.over else ""
        return Ending(self.step, self.loss, self.validation, self.step < steps and not early, early)

    def go_on(self, extra: dict[str, Any]) -> None:
        """Take what was saved beside the weights; of a run from its beginning, nothing."""
        self.skips = extra.get("skips", 0)
        if "stopping" in extra:
            self.stopping.load_state_dict(extra["stopping"])
        if self.average is not None:
            self.average.updates = extra.get("updates", 0)

    @property
    def _ends(self) -> bool:
        return self.step >= self.config.training.steps or self.stopping.over

    def save(self, while_best: bool = False) -> None:
        """Save the run as it is; `while_best`: for its validation loss, and not because it is time to."""
        if self._saved == self.step and self.step:
            return
        self.checkpointer.save(
            self.step,
            self.pipe,
            self.optimizer,
            scheduler=self.rate,
            scaler=self.scaler,
            data=self.data,
            averages=None if self.average is None else self.average.tensors,
            extra={
                "skips": self.skips,
                "base": self._base,
                "stopping": self.stopping.state_dict(),
                "updates": 0 if self.average is None else self.average.updates,
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

    # -- one step

    def _train(self) -> tuple[float, float, float, int]:
        """Forward, backward and update: (loss, norm of the gradients, learning rate, tokens)."""
        passes = self.config.training.accumulate
        loss, tokens = 0.0, 0
        batches = [self.data.at(self.step * passes + number) for number in range(passes)]
        shares = self._shares(batches)
        self._mark, run = 0, 0
        for batch, share in zip(batches, shares, strict=True):
            tokens += batch.tokens
            self._mark = batch.mark(self._mark)
            if math.isfinite(loss):  # else the step is lost
                result = self._pass(batch, share)
                loss += math.nan if result.loss is None else result.loss.item()
                run += 1
        norm = self._clip()
        lr = self.optimizer.param_groups[-1]["lr"]  # of those without a rate of their own
        if not math.isfinite(loss) or not (math.isfinite(norm) or self._scale_falls(norm)):
            self._not_finite(loss, norm, batches[run - 1], shares[run - 1])
        elif self.scaler is not None:
            self.scaler.step(self.optimizer)  # which leaves out what overflowed
        else:
            self.optimizer.step()
        if math.isfinite(loss) and math.isfinite(norm):
            self.skips = 0
            if self.average is not None:
                self.average.update()
        if self.scaler is not None:
            self.scaler.update()
        self.rate.step()
        self.optimizer.zero_grad()
        self.pipe.zero_grad()
        return loss, norm, lr, tokens

    def _train_ahead(self, count: int, pace: Pace) -> tuple[float, float, float, int]:
        """So many steps that overlap; all but the last are reported here, and the last is for the loop to report."""
        self._mark = 0
        last: Trained | None = None
        for trained in train_overlapped(
            self.config, self.pipe, self.optimizer, self.rate, self._batches(count), self._shares
        ):
            if last is not None:
                pace.step(last.tokens)
                self.step += 1
                self._report(last.loss, last.norm, last.lr, pace, self._memory_by_rank, None, None)
            if trained.updated:
                self.skips = 0
            else:
                self._left_out(trained.loss, trained.norm)
            last = trained
        assert last is not None
        return last.loss, last.norm, last.lr, last.tokens

    def _batches(self, count: int) -> Iterator[DataBatch]:
        for number in range(self.step, self.step + count):
            batch = self.data.at(number)
            self._mark = batch.mark(self._mark)
            yield batch

    def _left_out(self, loss: float, norm: float) -> None:
        """The update of a step that overlapped with others was left out; the end, if that must not be."""
        self.skips += 1
        what = f"the loss is {loss:.6g}" + (f", the norm of the gradients {norm}" if math.isfinite(loss) else "")
        if self.config.training.nonfinite == "skip" and self.skips <= self.config.training.most_skips:
            self.progress.say(f"step {self.step + 1}: {what}; the step is left out ({self.skips} in a row)")
            return
        raise NonFinite(
            f"step {self.step + 1}: {what}. The newest checkpoint is from before it; resume with "
            f"pipeline.overlap_steps=false to be told which module it comes from, or set training.nonfinite=skip to "
            f"leave such steps out"
        )

    def _clip(self) -> float:
        self._memory.see_gradients()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        clip = self.config.optimizer.clip
        return (self.pipe.grad_norm() if clip is None else self.pipe.clip_grad_norm_(clip)).item()

    def _scale_falls(self, norm: float) -> bool:
        """In fp16, gradients that overflow are how the right scale is found; not for ever, though."""
        if self.scaler is None or self.skips >= OVERFLOWS:
            return False
        self.skips += 1
        return True

    def _mine(self, batch: DataBatch) -> DataBatch:
        mesh = self.pipe.composition.axes.mesh
        return batch if mesh is None else batch.share(mesh.get_local_rank("dp"), self.config.mesh.replicas)

    def _shares(self, batches: list[DataBatch]) -> list[dict[str, Any]]:
        """What each pass of a step counts in it, for the loss; of the rows of all replicas."""
        return shares_of(self.pipe.loss_fn, [batch.target for batch in batches])

    def _pass(self, batch: DataBatch, share: dict[str, Any]) -> StepResult:
        mine = self._mine(batch)
        return self.pipe.step(*mine.args, target=mine.target, loss_kwargs=share, **mine.kwargs)

    def _not_finite(self, loss: float, norm: float, batch: DataBatch, share: dict[str, Any]) -> None:
        """A step that must not reach the weights: left out, or the end."""
        self.skips += 1
        what = f"the loss is {loss:.6g}" + (f", the norm of the gradients {norm}" if math.isfinite(loss) else "")
        most = self.config.training.most_skips
        if self.config.training.nonfinite == "skip" and self.skips <= most:
            self.progress.say(f"step {self.step + 1}: {what}; the step is left out ({self.skips} in a row)")
            return
        if self.scaler is not None:
            self.scaler.update()
        where = find_culprit(self.pipe, lambda: self._pass(batch, share))
        often = f" in {self.skips} steps in a row" if self.skips > 1 else ""
        raise NonFinite(
            f"step {self.step + 1}: {what}{often}. First bad: {where}. The newest checkpoint is from before it; lower "
            f"optimizer.lr or optimizer.clip, or set training.nonfinite=skip to leave such steps out"
        )

    # -- between steps

    def _tell(self, asked: bool) -> tuple[bool, list[int]]:
        """Whether any rank was asked to stop, and every rank's memory; all must have been given the same batch."""
        answers = self.processes.exchange((asked, memory_now(), self._mark))
        other = next((rank for rank, (_, _, mark) in enumerate(answers) if mark != answers[0][2]), None)
        if other is not None:
            raise ModelError(
                f"{self.data.words}: in step {self.step}, rank {other} was given another batch than rank 0, so that "
                f"inputs and targets are not of the same rows; draw from generators with a seed of their own, or "
                f"return an object with batch(number)"
            )
        return any(asked for asked, _, _ in answers), [memory for _, memory, _ in answers]

    def _tell_memory(self) -> None:
        """What each process holds, by kind: in the folder of the run, and as a table."""
        rows = [Memory(*each) for each in self.processes.exchange(astuple(self._memory.memory()))]
        if self.metrics is not None:  # on the rank that writes
            write_json(self.folder.memory, memory_document(rows))
        in_threads = len(rows) == 1 and self.config.pipeline.ranks > 1
        self.progress.say(f"\n{memory_table(rows, ['all'] if in_threads else None)}")

    def _evaluate(self) -> float | None:
        """The mean loss on batches that are not trained on, with the average of the weights where there is one."""
        mean = MeanLoss(self.pipe.loss_fn)
        with nullcontext() if self.average is None else self.average.in_place():
            for number in range(self.config.evaluation.batches):
                batch = self.data.validation(number)
                if batch is None:
                    break
                mine, (share,) = self._mine(batch), self._shares([batch])
                result = self.pipe.evaluate(*mine.args, target=mine.target, loss_kwargs=share, **mine.kwargs)
                if result.loss is not None:
                    mean.add(result.loss.item(), batch.target)
        self.validation = mean.value
        return self.validation

    def _seen(self, validation: float | None) -> bool:
        """Whether the weights of this step are the best so far, and are to be saved for that."""
        self._score = validation if validation is not None and math.isfinite(validation) else None
        lowest = validation is not None and self.stopping.see(self.step, validation)
        return lowest and self.config.checkpoint.keep_best

    def _report(
        self,
        loss: float,
        norm: float,
        lr: float,
        pace: Pace,
        memory: list[int],
        recorded: Recorded | None,
        validation: float | None,
    ) -> None:
        self.loss = loss
        steps = self.config.training.steps
        mfu = None if self.utilisation is None else self.utilisation * pace.rate
        left = pace.left(steps - self.step)
        if self.metrics is not None:
            self.metrics.write(
                self.step,
                loss=loss,
                lr=lr,
                norm=norm,
                validation=validation,
                tokens_per_second=round(pace.rate, 1),
                seconds=round(pace.seconds, 6),
                mfu=None if mfu is None else round(mfu, 4),
                eta=round(left, 1),
                memory=memory,
                idle=None if recorded is None else round(recorded.idle, 4),
                skipped=True if self.skips else None,
            )
        self._idle = recorded.idle if recorded is not None else self._idle
        reading = Reading(
            step=self.step,
            steps=steps,
            loss=loss,
            lr=lr,
            norm=norm,
            rate=pace.rate,
            memory=max(memory),
            idle=self._idle,
            left=left,
            validation=validation,
            mfu=mfu,
        )
        self.progress.show(reading)
