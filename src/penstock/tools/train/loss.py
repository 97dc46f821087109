"""The loss of a step that may take several passes, microbatches and replicas, each with another number of targets.

A mean of means is not the mean over all targets. So the built-in loss is a sum, divided by the count of the whole step,
which is known before its first pass: sums of gradients are then exact, however the step is cut up. A loss of the user's
is a mean over its own microbatch; the pipeline weighs microbatches, and here passes are weighed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import ModelError, UsageError
from penstock.runtime.loss.add_loss import add_loss
from penstock.runtime.loss.loss_options import LossOptions
from penstock.runtime.loss.losses import own_loss
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import find_source

IGNORED = -100  # a target that is not learned
ROUTER = "router"  # the name of the router's loss among a step's extra losses
LossFunction = Callable[..., Any]


class StepLoss:
    """A loss that is given in each pass how much that pass counts in its step."""

    options = LossOptions()

    def shares(self, targets: Sequence[Any]) -> list[dict[str, Any]]:
        """Return for each pass of a step, given the targets of all, the keyword arguments for what it counts."""
        raise NotImplementedError

    def count(self, target: Any) -> float:
        """Return what a whole batch counts in a mean over several."""
        raise NotImplementedError


class TokenLoss(StepLoss):
    """Cross-entropy of the next token: the mean over all target tokens of a step, or over its rows.

    The scores are the model's output, or what it carries as `logits`. A router's loss of a mixture of experts is added
    by its coefficient, as a mean over microbatches, because it is not a sum over tokens.
    """

    options = LossOptions(reduction="sum", per_microbatch=True)  # a sum over rows, which needs no check by batches

    def __init__(self, weight: str = "tokens", label_smoothing: float = 0.0, router: float = 0.0) -> None:
        self.weight, self.label_smoothing, self.router = weight, label_smoothing, router

    def __call__(self, output: Any, target: Tensor, total: float = 1.0, passes: int = 1) -> Tensor:
        if self.router:
            add_loss(ROUTER, self.router / passes * _router_loss(output))
        scores = scores_of(output).flatten(0, -2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        smoothed = partial(F.cross_entropy, scores, target.flatten(), label_smoothing=self.label_smoothing)
        if self.weight == "tokens":
            return smoothed(reduction="sum") / total
        losses = smoothed(reduction="none").view(target.shape).flatten(1).sum(1)
        counted = (target != IGNORED).flatten(1).sum(1).clamp(min=1)
        return (losses / counted).sum() / total

    def count(self, target: Any) -> float:
        """Count the target tokens that are learned, or the rows that have any."""
        learned = target != IGNORED
        return float((learned if self.weight == "tokens" else learned.flatten(1).any(1)).sum())

    def shares(self, targets: Sequence[Any]) -> list[dict[str, Any]]:
        total = sum(self.count(target) for target in targets)
        if not total:
            raise ModelError(
                f"no target of this step counts ({IGNORED} is left out); the mean loss of such a batch is not defined"
            )
        return [{"total": total, "passes": len(targets)} for _ in targets]


class GivenLoss(StepLoss):
    """A loss of the user's or the model's own: a mean over its microbatch."""

    def __init__(self, function: LossFunction | None, weight: str | None) -> None:
        self._function, self._weight = function, weight
        if weight is not None:
            self.options = LossOptions(weight=self.count)

    def __call__(self, output: Any, target: Any, divisor: float = 1.0) -> Any:
        loss = own_loss(output) if self._function is None else self._function(output, target)
        return loss if divisor == 1 else loss / divisor

    def count(self, target: Any) -> float:
        """Count the targets that are not ignored, or the rows; batches count alike where nothing is known."""
        if self._weight is None:
            return 1.0
        if not isinstance(target, Tensor):
            raise UsageError(
                f'loss.weight = "{self._weight}" counts entries of a tensor, and the target is a '
                f"{type(target).__name__}; leave it out"
            )
        return float((target != IGNORED).sum() if self._weight == "tokens" else len(target))

    def shares(self, targets: Sequence[Any]) -> list[dict[str, Any]]:
        counts = [self.count(target) for target in targets]
        if not all(counts):
            raise ModelError(f"pass {counts.index(0)} of this step has no target that counts; its mean is not defined")
        return [{"divisor": sum(counts) / count} for count in counts]


def scores_of(output: Any) -> Tensor:
    """Return the scores of tokens in what a model returned."""
    scores = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if scores is None and isinstance(output, dict):
        scores = output.get("logits")
    if not isinstance(scores, Tensor):
        raise TypeError(
            f"the model returned a {type(output).__name__}; the loss of tokens needs a tensor of scores, or `logits`"
        )
    return scores


def _router_loss(output: Any) -> Tensor:
    loss = getattr(output, "aux_loss", None)
    if not isinstance(loss, Tensor):
        raise ModelError(
            "loss.router is set, but the model's output has no aux_loss; leave it out, or let the model return one"
        )
    return loss


# -- from a configuration


def build_loss(config: TrainConfig, model: nn.Module, own: LossFunction | None, targets: bool) -> LossFunction | None:
    """Build the loss of a run. `own` came with the model; without `targets`, the model returns its loss."""
    options = config.loss
    if options.function:
        function = find_source("loss.function", options.function)
        return GivenLoss(partial(function, **options.options) if options.options else function, options.weight)
    if targets and own is None:
        return TokenLoss(options.weight or "tokens", options.label_smoothing, router_coefficient(config, model))
    builtin = [name for name in ("label_smoothing", "router") if getattr(options, name)]
    if builtin:
        whose = "model.source brings a loss of its own" if targets else "the model computes its own loss"
        raise UsageError(f"loss.{builtin[0]} is for the built-in loss, and {whose}; leave it out")
    if not targets:
        return GivenLoss(None, None) if config.training.accumulate > 1 else None
    wrapped = config.training.accumulate > 1 or options.weight is not None
    return GivenLoss(own, options.weight) if wrapped else own


def router_coefficient(config: TrainConfig, model: nn.Module) -> float:
    """Return how much the router's loss counts, and have the model return one where it does."""
    shape = getattr(model, "config", None)
    asked = bool(getattr(shape, "output_router_logits", False))
    if config.loss.router is None:
        return float(getattr(shape, "router_aux_loss_coef", 0.0)) if asked else 0.0
    if config.loss.router and not hasattr(shape, "output_router_logits"):
        raise UsageError(
            f"loss.router is {config.loss.router}, but {config.model.source} has no router loss: its configuration has "
            f"no output_router_logits; leave loss.router out"
        )
    if shape is not None and hasattr(shape, "output_router_logits"):
        shape.output_router_logits = bool(config.loss.router)
    return config.loss.router


def shares_of(loss: Any, targets: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the keyword arguments of a pipeline's loss for each pass of a step; none for a loss of the user's."""
    return loss.shares(targets) if isinstance(loss, StepLoss) else [{} for _ in targets]


class MeanLoss:
    """The loss over several batches, each by what it counts."""

    def __init__(self, loss: Any) -> None:
        self._loss, self._sum, self._count = loss, 0.0, 0.0

    def add(self, value: float, target: Any) -> None:
        count = self._loss.count(target) if isinstance(self._loss, StepLoss) else 1.0
        self._sum += value * count
        self._count += count

    @property
    def value(self) -> float | None:
        """None where there was no batch."""
        return self._sum / self._count if self._count else None
