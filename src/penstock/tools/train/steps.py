"""One optimizer step of a run on this rank: its passes, clipping and the update; or some steps that overlap.

A step whose loss or gradients are inf or NaN must not reach the weights: it is left out, or it ends the run.

Ranks of `Pipeline.train_steps` do not wait for each other. But a run evaluates, saves, records and looks whether it was
asked to stop, and all ranks must be at the same step for that. So steps overlap from one such moment to the next, and
never more than `MOST` of them, so that Ctrl-C is not kept waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR

from penstock.checkpoint.files.adapters import is_adapter
from penstock.pipeline import Pipeline, StepResult
from penstock.pipeline.batches import Call
from penstock.runtime.optim.scaler import GradScaler
from penstock.tools.train.config.device import device_of
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import HUGGINGFACE
from penstock.tools.train.data.batch import DataBatch, DataBatches
from penstock.tools.train.loss import shares_of
from penstock.tools.train.models.huggingface import is_pretrained
from penstock.tools.train.run.memory import MemoryWatch
from penstock.tools.train.updates.ema import WeightAverage
from penstock.tools.train.updates.nonfinite import NonFinite, find_culprit
from penstock.tools.train.updates.optimizer import build_optimizer, build_rate

# Halvings of fp16's scale in a row, from 2^16 to where nothing is left of a gradient.
OVERFLOWS = 40
MOST = 16  # steps of one stretch


class Trained(NamedTuple):
    """What is reported of one step."""

    loss: float
    norm: float
    lr: float
    tokens: int
    updated: bool


def stretch(config: TrainConfig, step: int, unrecorded: int) -> int:
    """Return how many steps after `step` may overlap; below 2, none."""
    if not config.pipeline.overlap_steps:
        return 0
    rooms = [config.training.steps - step, unrecorded, MOST]
    rooms += [every - step % every for every in (config.evaluation.every, config.checkpoint.every) if every]
    return min(rooms)


@dataclass(frozen=True)
class RunState:
    """The pipeline of a run with its optimizer, learning rate and data, on this process."""

    config: TrainConfig
    pipe: Pipeline
    data: DataBatches
    optimizer: torch.optim.Optimizer
    rate: LambdaLR
    scaler: GradScaler | None  # Only fp16 has one.
    average: WeightAverage | None  # Only training.ema has one.

    @classmethod
    def of(cls, config: TrainConfig, pipe: Pipeline, data: DataBatches) -> RunState:
        """Make the state with which a run begins."""
        optimizer = build_optimizer(config, pipe)
        return cls(
            config,
            pipe,
            data,
            optimizer,
            build_rate(config, optimizer),
            GradScaler(pipe) if config.pipeline.precision == "fp16" else None,
            None if config.training.ema is None else WeightAverage(pipe, config.training.ema),
        )

    @property
    def saved(self) -> dict[str, Any]:
        """What a `Checkpointer` saves and loads beside the pipeline and the optimizer."""
        averages = None if self.average is None else self.average.tensors
        return {"scheduler": self.rate, "scaler": self.scaler, "data": self.data, "averages": averages}


class TrainingSteps:
    """Trains step after step; `notify` takes lines for the user."""

    def __init__(self, state: RunState, notify: Callable[[str], None]) -> None:
        self.skips = 0  # steps in a row that were left out
        self.mark = 0  # a checksum of what the last step was given
        self.memory = MemoryWatch(state.pipe, state.optimizer, state.average)
        self._state, self._config, self._notify = state, state.config, notify

    def train(self, step: int) -> Trained:
        """Forward, backward and update, after `step` steps."""
        with self.memory.step():
            return self._train(step)

    def train_ahead(self, step: int, count: int) -> Iterator[Trained]:
        """Train so many steps that overlap, after `step` steps."""
        self.mark = 0
        state, optimizer = self._state, self._state.optimizer
        given: list[int] = []  # Tokens of steps whose results are to come.
        rate = optimizer.param_groups[-1]["lr"]  # The rate of the next update, in groups without one of their own.

        def calls() -> Iterator[Call]:
            for batch in self._batches(step, count):
                own, (share,) = self.mine(batch), self._shares([batch])
                given.append(batch.tokens)
                yield Call("train_steps()", own.args, own.kwargs, own.target, share, False, training=True)

        results = state.pipe.train_steps(
            calls(), optimizer, clip=self._config.optimizer.clip, scheduler=state.rate, skip_nonfinite=True
        )
        for number, result in enumerate(results, step + 1):
            loss, norm = (math.nan if each is None else each.item() for each in (result.loss, result.norm))
            lr, rate = rate, optimizer.param_groups[-1]["lr"]
            if result.updated:
                self.skips = 0
            else:
                self._leave_out(number, loss, norm, None)
            yield Trained(loss, norm, lr, given.pop(0), result.updated)

    def mine(self, batch: DataBatch) -> DataBatch:
        """Return this replica's rows."""
        mesh = self._state.pipe.composition.axes.mesh
        return batch if mesh is None else batch.share(mesh.get_local_rank("dp"), self._config.mesh.replicas)

    def _batches(self, begin: int, count: int) -> Iterator[DataBatch]:
        for number in range(begin, begin + count):
            batch = self._state.data.at(number)
            self.mark = batch.mark(self.mark)
            yield batch if device_of(self._config) is None else batch.pinned()

    def _train(self, step: int) -> Trained:
        state, passes = self._state, self._config.training.accumulate
        self.mark = 0
        batches = list(self._batches(step * passes, passes))
        shares = self._shares(batches)
        loss, run = 0.0, 0
        for batch, share in zip(batches, shares, strict=True):
            if math.isfinite(loss):  # Else the step is lost.
                result = self._pass(batch, share)
                loss += math.nan if result.loss is None else result.loss.item()
                run += 1
        norm = self._clip()
        lr = state.optimizer.param_groups[-1]["lr"]  # The rate of groups without one of their own.
        if not math.isfinite(loss) or not (math.isfinite(norm) or self._scale_falls()):
            self._leave_out(step + 1, loss, norm, lambda: self._pass(batches[run - 1], shares[run - 1]))
        elif state.scaler is not None:
            state.scaler.step(state.optimizer)  # It leaves out what overflowed.
        else:
            state.optimizer.step()
        updated = math.isfinite(loss) and math.isfinite(norm)
        if updated:
            self.skips = 0
            if state.average is not None:
                state.average.update()
        if state.scaler is not None:
            state.scaler.update()
        state.rate.step()
        state.optimizer.zero_grad()
        state.pipe.zero_grad()
        return Trained(loss, norm, lr, sum(batch.tokens for batch in batches), updated)

    def _shares(self, batches: list[DataBatch]) -> list[dict[str, Any]]:
        """Return what each pass of a step counts in it, for the loss; of the rows of all replicas."""
        return shares_of(self._state.pipe.loss_fn, [batch.target for batch in batches])

    def _pass(self, batch: DataBatch, share: dict[str, Any]) -> StepResult:
        mine = self.mine(batch)
        return self._state.pipe.step(*mine.args, target=mine.target, loss_kwargs=share, **mine.kwargs)

    def _clip(self) -> float:
        self.memory.see_gradients()
        pipe, clip = self._state.pipe, self._config.optimizer.clip
        if self._state.scaler is not None:
            self._state.scaler.unscale_(self._state.optimizer)
        return (pipe.grad_norm() if clip is None else pipe.clip_grad_norm_(clip)).item()

    def _scale_falls(self) -> bool:
        """Return whether fp16 is searching for its scale, by gradients that overflow; it may do so only so often."""
        if self._state.scaler is None or self.skips >= OVERFLOWS:
            return False
        self.skips += 1
        return True

    def _leave_out(self, step: int, loss: float, norm: float, again: Callable[[], StepResult] | None) -> None:
        """Leave a step out, or end the run; `again` repeats the pass that went wrong, where that can be."""
        self.skips += 1
        options = self._config.training
        what = f"the loss is {loss:.6g}" + (f", the norm of the gradients {norm}" if math.isfinite(loss) else "")
        if options.nonfinite == "skip" and self.skips <= options.most_skips:
            self._notify(f"step {step}: {what}; the step is left out ({self.skips} in a row)")
            return
        what += f" in {self.skips} steps in a row" if self.skips > 1 else ""
        remedy = "resume with pipeline.overlap_steps=false to be told which module it comes from"
        if again is not None:
            if self._state.scaler is not None:
                self._state.scaler.update()
            culprit = find_culprit(self._state.pipe, again)
            what += f". First bad: {culprit.words}"
            remedy = "lower optimizer.lr or optimizer.clip"
            if culprit.parameter and self.skips == step:  # no step has changed a weight
                raise NonFinite(f"step {step}: {what}. {self._beginning(culprit.parameter)}")
        raise NonFinite(
            f"step {step}: {what}. The newest checkpoint is from before it; {remedy}, or set training.nonfinite=skip "
            f"to leave such steps out"
        )

    def _beginning(self, parameter: str) -> str:
        """Describe where a parameter that was bad from the start has its values from, and what to do about it."""
        adapter, source = self._config.lora.adapter, self._config.model.source
        if adapter is not None and is_adapter(parameter):
            return f"The adapter in {adapter} holds it (lora.adapter); take one that was saved before that"
        if is_pretrained(self._config):
            return (
                f"The weights in {source.removeprefix(HUGGINGFACE)} hold it, before any training; write that folder "
                f'again, or start without its weights by model.init = "random"'
            )
        return f"The model begins with it: model.source is {source}"
