"""What the last stage's rank knows of an evaluation, told to all: metrics, and predictions where they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.trainer_utils import EvalLoopOutput

from penstock.pipeline import Pipeline
from penstock.pipeline.model_state.carry import carry

__all__ = ["from_last_rank", "logits_of"]


def logits_of(output: Any, left_out: Sequence[str], has_loss: bool) -> Any:
    """Return what a Trainer takes for predictions: all of a model's output but its loss."""
    if isinstance(output, Mapping):
        logits = tuple(value for name, value in output.items() if name not in left_out)
    else:
        logits = output[1:] if has_loss else output
    return logits[0] if len(logits) == 1 else logits


def from_last_rank(pipe: Pipeline, output: EvalLoopOutput, *, predictions: bool) -> EvalLoopOutput:
    """Return the output of an evaluation loop as it is on the last stage's rank; called on every rank."""
    deployment = pipe.deployment
    transport = deployment.world.transport
    if transport is None:
        return output
    last = deployment.placement.rank_of(deployment.staged.stages - 1)
    metrics = deployment.world.all_gather("evaluate()", output.metrics)[last]
    output = output._replace(metrics=metrics)
    if predictions:
        found: list[Any] = []
        arrays = pytree.tree_map_only(np.ndarray, torch.from_numpy, output.predictions)
        targets = [rank for rank in range(deployment.schedule.ranks) if rank != last]
        carry(transport, [("predictions", last, targets)], lambda _: arrays, lambda _, value: found.append(value))
        if found:
            own = pytree.tree_map_only(Tensor, lambda tensor: tensor.clone().numpy(), found[0])
            output = output._replace(predictions=own)
    return output
