"""The loss of a checkpoint on the validation data, outside of training."""

from __future__ import annotations

from pathlib import Path

from penstock.checkpoint.checkpointer import Checkpointer
from penstock.errors import UsageError
from penstock.pipeline import Pipeline
from penstock.train.build import build_model, build_pipeline
from penstock.train.config.settings import TrainConfig
from penstock.train.data.batches import open_data
from penstock.train.huggingface import check_base, left_out


def evaluate_checkpoint(config: TrainConfig, checkpoint: Path, batches: int) -> tuple[int, list[float]]:
    """The step of a checkpoint, and its loss on each validation batch; in this process, whatever the saved layout."""
    data = open_data(config)
    model, loss = build_model(config)
    pipe = build_pipeline(config, model, loss, data.first(), ranks=config.pipeline.ranks, transport="threads")
    with pipe:
        step = load_for(config, checkpoint, pipe)
        losses = []
        for number in range(batches):
            batch = data.validation(number)
            if batch is None:
                break
            result = pipe.evaluate(*batch.args, target=batch.target, **batch.kwargs)
            if result.loss is not None:
                losses.append(result.loss.item() * config.training.accumulate)
    if not losses:
        raise UsageError(
            "there is no validation data: data.validation is a share of the tokens that must hold more than one row "
            "(data.sequence); a module:function gives it by validation(number)"
        )
    return step, losses


def load_for(config: TrainConfig, checkpoint: Path, pipe: Pipeline) -> int:
    """Put a checkpoint's weights into a pipeline of any layout; the step that they are from."""
    loaded = Checkpointer(checkpoint.parent, leave_out=left_out(config)).load(pipe, path=checkpoint)
    check_base(config, loaded.extra.get("base"))
    return int(loaded.step)
