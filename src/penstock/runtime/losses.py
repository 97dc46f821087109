"""What each microbatch's loss counts in the loss of the batch, and losses from inside stages.

A gradient is right when its seed is: each microbatch's loss is seeded with its share of the
batch, and `.grad` is never touched afterwards. So several steps before one optimizer step
just add, tied parameters are not scaled twice, and hooks see final numbers.

    mean   share = weight of the microbatch / weight of the batch; the weight is its number of
           rows, or what `loss_weight(target)` says (say, its number of valid tokens)
    sum    share = 1
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from penstock.errors import ModelError, RunError, UsageError
from penstock.runtime.microbatch import Batch

__all__ = ["ExtraLosses", "add_loss", "loss_shares"]

REDUCTIONS = ("mean", "sum")


def loss_shares(batch: Batch, reduction: str, loss_weight: Callable[[Any], Any] | None) -> list[float]:
    """Each microbatch's share of the batch's loss."""
    count = len(batch.args)
    if reduction == "sum":
        return [1.0] * count
    if loss_weight is not None:
        if not batch.has_target:
            raise UsageError("loss_weight reads the target, but step() got none on the rank of the last stage")
        weights = [float(loss_weight(target)) for target in batch.targets]
    elif batch.rows is not None:
        weights = [float(rows) for rows in batch.rows]
    else:
        weights = [1.0] * count
    total = sum(weights)
    if not total > 0:
        raise ModelError(f"the microbatches weigh {total} in all; the mean loss of such a batch is not defined")
    return [weight / total for weight in weights]


def check_loss(loss: Any) -> Tensor:
    """The loss as a scalar tensor, or an error that says what it is instead."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ModelError(f"the loss is {what}; loss_fn(output, target) must return a scalar tensor, such as its mean")
    return loss


class ExtraLosses:
    """Collects what `add_loss` is given while one stage computes one microbatch."""

    _current = threading.local()

    def __init__(self) -> None:
        self.found: list[tuple[str, Tensor]] = []

    def __enter__(self) -> ExtraLosses:
        self._outer = getattr(self._current, "collector", None)
        self._current.collector = self
        return self

    def __exit__(self, *_: object) -> None:
        self._current.collector = self._outer


def add_loss(name: str, value: Tensor) -> None:
    """Add a loss from inside any stage's forward, such as an expert balance; by name.

    The batch's loss of that name is the mean over microbatches (and the sum over the calls in
    one microbatch); its gradient flows, and `result.extra_losses` reports it on every rank.
    """
    collector = getattr(ExtraLosses._current, "collector", None)
    if collector is None:
        raise RunError(f"add_loss({name!r}) was called outside of a pipeline's forward")
    collector.found.append((name, check_loss(value)))
