"""A pipeline in the place where a Trainer expects its (wrapped) model.

The loop of a Trainer asks its model for parameters, modes, zero_grad and load_state_dict. On processes the model itself
has no values for what other ranks hold, so these questions go to the pipeline. What the last stage's rank knows of an
evaluation is told to all: metrics, and predictions where they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.trainer_utils import EvalLoopOutput

from penstock.integrations.optimizer_state import Misfits, load_own
from penstock.pipeline import Pipeline
from penstock.pipeline.model_state.carry import carry


class Pipelined(nn.Module):
    """A model and the pipeline that runs it; its parameters are this process's."""

    def __init__(self, model: nn.Module, pipe: Pipeline) -> None:
        super().__init__()
        self.module, self.pipe = model, pipe

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) of the stages in this process; a tied one goes by its first name in the model."""
        first = self.pipe.state.first_names()
        for name, parameter in self.pipe.named_parameters():
            yield first.get(name, name), parameter

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.pipe.parameters()

    def train(self, mode: bool = True) -> Self:
        self.training = mode
        self.pipe.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.pipe.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Misfits:
        """Take this process's part of a model's state, or of one file of it."""
        return load_own(self.pipe, state_dict)


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
