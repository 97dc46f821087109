"""The loss of a checkpoint on the validation data, outside of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from penstock.checkpoint.checkpointer import Checkpointer
from penstock.checkpoint.load.reading import CheckpointContents
from penstock.errors import UsageError
from penstock.pipeline import Pipeline
from penstock.train.build import build_model, build_pipeline
from penstock.train.config.settings import TrainConfig
from penstock.train.data.batch import DataBatch, DataBatches
from penstock.train.data.batches import open_data
from penstock.train.generation.opening import check_sizes, saved_config
from penstock.train.loss import MeanLoss, shares_of
from penstock.train.models.huggingface import check_base, left_out
from penstock.train.updates.ema import WeightAverage


class Evaluated(NamedTuple):
    """What was found out about a checkpoint."""

    step: int
    losses: list[float]  # of each validation batch
    loss: float  # of all of them, each by its targets


def evaluate_checkpoint(config: TrainConfig, checkpoint: Path, batches: int, averages: bool = True) -> Evaluated:
    """The loss of a checkpoint on the validation batches; in this process, whatever the saved layout."""
    check_sizes(config, CheckpointContents(checkpoint))
    data = open_data(config)
    model, loss = build_model(config)
    pipe = build_pipeline(config, model, loss, data.first(), ranks=config.pipeline.ranks, transport="threads")
    with pipe:
        step = load_for(config, checkpoint, pipe, averages=averages)
        losses, mean = validation_losses(pipe, data, batches, lambda batch: batch)
    if mean is None:
        raise UsageError(
            "there is no validation data: data.validation is a share of the tokens that must hold more than one row "
            "(data.sequence); a module:function gives it by validation(number)"
        )
    return Evaluated(step, losses, mean)


def validation_losses(
    pipe: Pipeline, data: DataBatches, batches: int, own: Callable[[DataBatch], DataBatch]
) -> tuple[list[float], float | None]:
    """The loss of each validation batch, and of all of them, each by its targets; `own` is a replica's share."""
    losses, mean = [], MeanLoss(pipe.loss_fn)
    for number in range(batches):
        batch = data.validation(number)
        if batch is None:
            break
        mine, (share,) = own(batch), shares_of(pipe.loss_fn, [batch.target])
        result = pipe.evaluate(*mine.args, target=mine.target, loss_kwargs=share, **mine.kwargs)
        if result.loss is not None:
            losses.append(result.loss.item())
            mean.add(losses[-1], batch.target)
    return losses, mean.value


def load_for(config: TrainConfig, checkpoint: Path, pipe: Pipeline, *, averages: bool = True) -> int:
    """Put a checkpoint's weights into a pipeline of any layout, by default as it was evaluated: averaged, where it has
    averages; returns the step that they are from."""
    average = WeightAverage(pipe, 1.0) if averages and saved_config(checkpoint).training.ema is not None else None
    tensors = None if average is None else average.tensors
    saved = Checkpointer(checkpoint.parent, leave_out=left_out(config))
    loaded = saved.load(pipe, path=checkpoint, averages=tensors)
    check_base(config, loaded.extra.get("base"))
    if average is not None:
        average.begin(loaded.averages)
        average.write()
    return int(loaded.step)
