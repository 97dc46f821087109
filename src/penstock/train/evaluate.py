"""The loss of a checkpoint on the validation data, outside of training."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import UsageError
from penstock.train.build import build_model, build_pipeline
from penstock.train.config.settings import TrainConfig
from penstock.train.data.batches import open_data
from penstock.train.generate import load_for


def evaluate_checkpoint(
    config: TrainConfig, checkpoint: Path, batches: int, averages: bool = True
) -> tuple[int, list[float]]:
    """The step of a checkpoint, and its loss on each validation batch; in this process, whatever the saved layout."""
    data = open_data(config)
    model, loss = build_model(config)
    pipe = build_pipeline(config, model, loss, data.first(), ranks=config.pipeline.ranks, transport="threads")
    with pipe:
        step = load_for(config, checkpoint, pipe, averages=averages)
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
