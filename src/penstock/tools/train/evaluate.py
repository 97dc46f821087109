"""The loss of a checkpoint on the validation data, outside of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from penstock.checkpoint.checkpointer import Checkpointer
from penstock.checkpoint.disk.manifest import read_manifest
from penstock.checkpoint.files.adapters import name_without_adapter
from penstock.checkpoint.load.reading import CheckpointContents
from penstock.errors import UsageError
from penstock.pipeline import Pipeline
from penstock.tools.train.build import build_model, build_pipeline, gpt_options
from penstock.tools.train.config.consistent import check_model
from penstock.tools.train.config.read import read_config
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.data.batch import DataBatch, DataBatches
from penstock.tools.train.data.batches import open_data
from penstock.tools.train.loss import MeanLoss, shares_of
from penstock.tools.train.models.huggingface import check_base, left_out
from penstock.tools.train.resume import extra_of
from penstock.tools.train.updates.ema import WeightAverage


class Evaluated(NamedTuple):
    """What was found out about a checkpoint."""

    step: int
    losses: list[float]  # One of each validation batch.
    loss: float  # The mean of all of them, each by its targets.


def evaluate_checkpoint(config: TrainConfig, checkpoint: Path, batches: int, averages: bool = True) -> Evaluated:
    """Evaluate a checkpoint on the validation batches; in this process, whatever the saved layout."""
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
    """Return the loss of each validation batch, and of all, each by its targets; `own` is a replica's share."""
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
    check_base(config, extra_of(loaded).get("base"))
    if average is not None:
        average.begin(loaded.averages)
        average.write()
    return int(loaded.step)


def saved_config(checkpoint: Path) -> TrainConfig:
    """Read the configuration that a checkpoint was trained with."""
    document: Any = read_manifest(checkpoint).config
    if not isinstance(document, dict) or "model" not in document:
        raise UsageError(f"{checkpoint} was not saved by penstock train: it has no configuration in it")
    return read_config(document, str(checkpoint))


def check_sizes(config: TrainConfig, contents: CheckpointContents) -> None:
    """Refuse a configuration whose sizes a checkpoint's tensors do not have, before memory is asked for by it."""
    check_model(config, f"the configuration for {contents.path}")
    if config.model.source != "gpt":
        return
    options = gpt_options(config)
    shapes = {name_without_adapter(name): saved["shape"] for name, saved in contents.tensors.items()}
    vocabulary, width = (*shapes.get("model.embed.token.weight", ()), 0, 0)[:2]
    context = (*shapes.get("model.embed.place.weight", ()), 0)[0]
    layers = len({name.split(".")[1] for name in shapes if name.startswith("model.block")})
    found = {"layers": layers, "width": width, "vocabulary": vocabulary, "context": context}
    asked = {name: getattr(options, name) or config.data.sequence for name in found}
    wrong = [
        f"model.options.{name} is {asked[name]}, not {size}" for name, size in found.items() if asked[name] != size
    ]
    if wrong:
        raise UsageError(f"{contents.path} holds another model than its configuration describes: {'; '.join(wrong)}")
