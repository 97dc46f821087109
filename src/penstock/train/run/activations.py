"""What one pass takes in memory on each rank of a pipeline, beside weights and gradients, found out without that pass.

One microbatch is run through all stages, which are threads here, and each compute waits for the one before to end; so
what the memory in use rises by is that compute's. Then each rank's actions are gone through in the order of the
schedule: a forward keeps something until its backward has ended, and while an action computes it needs more for a
moment.

Between processes a stage holds what it was sent, and not what it has sent away; on threads both are one tensor. So
what arrives is counted with the stage that it arrives at.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import PenstockError
from penstock.model.lazy import Init
from penstock.pipeline import Pipeline
from penstock.runtime.engine.handlers import Context
from penstock.runtime.engine.stage import Stage
from penstock.schedule import Action, Op, Schedule
from penstock.train.build import build_model, build_pipeline
from penstock.train.config.settings import TrainConfig
from penstock.train.data.batch import DataBatch
from penstock.train.loss import shares_of
from penstock.train.run.memory import PAUSE, Peak, bytes_of, in_use

COMPUTES = (Op.F, Op.B, Op.I, Op.W)
PASSES = 4  # the first is not counted: in it, gradients are made and libraries loaded


def measure_activations(
    config: TrainConfig, schedule: Schedule, balance: Any, batch: DataBatch, values: Init
) -> list[float] | None:
    """The most bytes on each rank of `schedule`, whose stages are cut by `balance`; None where it cannot be run."""
    if in_use() is None:
        return None
    looks = _Looks()
    for count in sorted({1, 2, config.pipeline.ranks, config.pipeline.microbatches}):
        try:
            pipe = _small_pipeline(config, count, balance, batch, values)
        except PenstockError:  # a schedule that needs more microbatches
            continue
        with pipe:
            _run(pipe, _rows(batch, config.pipeline.microbatches, count), looks)
        return [looks.most(row) for row in schedule.rows]
    return None


def _small_pipeline(config: TrainConfig, count: int, balance: Any, batch: DataBatch, values: Init) -> Pipeline:
    """The same on threads, with few microbatches of the size that they have."""
    few = replace(config, pipeline=replace(config.pipeline, microbatches=count))
    model, loss = build_model(config)
    rows = _rows(batch, config.pipeline.microbatches, count)
    ranks = config.pipeline.ranks
    return build_pipeline(few, model, loss, rows, ranks=ranks, balance=balance, transport="threads", values=values)


def _rows(batch: DataBatch, microbatches: int, count: int) -> DataBatch:
    """So many microbatches of a batch."""

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return value[: max(1, len(value) * count // microbatches)]

    args, kwargs, target = pytree.tree_map(cut, (batch.args, batch.kwargs, batch.target))
    return DataBatch(args, kwargs, target, batch.tokens)


def _run(pipe: Pipeline, batch: DataBatch, looks: _Looks) -> None:
    for executor in pipe.deployment.ranks.executors.values():
        looks.stages.update(executor.stages)
    for op in COMPUTES:
        pipe.register(op, looks.compute)
    (share,) = shares_of(pipe.loss_fn, [batch.target])
    for number in range(PASSES):
        looks.counts = number > 0
        pipe.step(*batch.args, target=batch.target, loss_kwargs=share, **batch.kwargs)


class _Looks:
    """A handler of computes that runs one at a time and sees what it does to the memory."""

    def __init__(self) -> None:
        self.counts = False
        self._turn = threading.Lock()
        self.stages: dict[int, Stage] = {}
        self._messages: dict[tuple[int, int], int] = {}  # by maker and taker: bytes of one microbatch
        self._changes: dict[tuple[Op, int], float] = {}  # what is held more when it has ended
        self._rises: dict[tuple[Op, int], float] = {}  # and at most while it runs

    def compute(self, action: Action, context: Context) -> None:
        """Run an action and look at it."""
        context.fetch(action)
        with self._turn:
            with Peak(PAUSE) as peak:
                context.compute(action)
            if not self.counts or peak.rise is None or peak.change is None:
                return
            key = (action.op, action.stage)
            self._changes[key] = min(self._changes.get(key, peak.change), peak.change)
            self._rises[key] = max(self._rises.get(key, 0.0), peak.rise)
            if action.op is Op.F:
                for maker, tensors in self.stages[action.stage].records[action.microbatch].leaves.items():
                    self._messages[maker, action.stage] = bytes_of(tensors)

    def most(self, row: Sequence[Action | None]) -> float:
        """The most that a rank holds while it goes through its actions."""
        held = peak = 0.0
        kept: dict[tuple[int, int], float] = {}
        for action in (part for each in row if each is not None for part in each.parts()):
            if action.op not in COMPUTES:
                continue
            stage, place = action.stage, (action.stage, action.microbatch)
            change, rise = self._changes[action.op, stage], self._rises[action.op, stage]
            arrives = sum(size for (_, taker), size in self._messages.items() if taker == stage)
            sent = sum(size for (maker, _), size in self._messages.items() if maker == stage)
            before = kept.get(place, 0.0)
            if action.op is Op.F:
                peak = max(peak, held + arrives + rise)
                kept[place] = max(0.0, change - sent + arrives)
            elif action.op is Op.I:
                peak = max(peak, held + sent + rise)
                kept[place] = max(0.0, before + change - arrives)
            else:
                peak = max(peak, held + (sent if action.op is Op.B else 0.0) + rise)
                kept[place] = 0.0
            held += kept[place] - before
        return peak
