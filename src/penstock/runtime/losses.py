"""What each microbatch's loss counts in the loss of the batch, and losses from inside stages.

A gradient is right when its seed is: each microbatch's loss is seeded with its share of the
batch, and `.grad` is never touched afterwards. So several steps before one optimizer step
just add, tied parameters are not scaled twice, and hooks see final numbers.

    mean   share = weight of the microbatch / weight of the batch; the weight is its number of
           rows, or what `loss_weight(target)` says (say, its number of valid tokens)
    sum    share = 1
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ModelError, RunError, UsageError
from penstock.model.aside import DRY, EVERYWHERE, run_kind
from penstock.runtime.microbatch import Batch

__all__ = [
    "ExtraLosses",
    "Seeds",
    "add_loss",
    "check_loss",
    "loss_shares",
    "loss_weights",
    "shares_of",
    "sum_in_order",
    "trained_loss",
]

REDUCTIONS = ("mean", "sum")


def loss_shares(batch: Batch, reduction: str, loss_weight: Callable[[Any], Any] | None) -> list[float]:
    """Each microbatch's share of the batch's loss."""
    weights = loss_weights(batch, reduction, loss_weight)
    return [1.0] * len(batch.args) if weights is None else shares_of(weights, sum(weights))


def loss_weights(batch: Batch, reduction: str, loss_weight: Callable[[Any], Any] | None) -> list[float] | None:
    """What each microbatch weighs in the mean; None where the losses are summed."""
    count = len(batch.args)
    if reduction == "sum":
        return None
    if loss_weight is not None:
        if not batch.has_target:
            raise UsageError("loss_weight reads the target, but step() got none on the rank of the last stage")
        return [_weight(number, loss_weight(target)) for number, target in enumerate(batch.targets)]
    return [1.0] * count if batch.rows is None else [float(rows) for rows in batch.rows]


def shares_of(weights: Sequence[float], total: float) -> list[float]:
    """Weights as shares of the whole batch, which may be more than these microbatches."""
    if not total > 0:
        raise ModelError(f"the microbatches weigh {total} in all; the mean loss of such a batch is not defined")
    return [weight / total for weight in weights]


def _weight(number: int, value: Any) -> float:
    """What loss_weight says of one microbatch, as a number that a mean can go by."""
    try:
        weight = float(value)
    except (TypeError, ValueError, RuntimeError):  # None, a text, a tensor of several numbers
        weight = math.nan
    if not 0 <= weight < math.inf:
        said = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) and value.dim() else repr(value)
        raise ModelError(
            f"loss_weight gave {said} for microbatch {number}; it must return one number, 0 or above, such as the "
            f"target's count of valid tokens"
        )
    return weight


class Seeds:
    """What enters the backward at each microbatch's loss: its share, as a tensor like the loss.

    All of them are made at once, when the first loss shows its kind: one by one they cost more than a small backward.
    A microbatch without a share takes no part: its own mean may well be nan, and 0 * nan would reach the weights.
    """

    def __init__(self, shares: Sequence[float], scale: float = 1.0, replicas: int = 1) -> None:
        self._shares = [share * scale for share in shares]
        self._counts = [share != 0 for share in shares]
        self._dtype: torch.dtype | None = None
        self._device: torch.device | None = None
        self._seeds: tuple[Tensor, ...] = ()
        self._of_named = scale / (len(shares) * replicas)

    def of(self, microbatch: int, loss: Tensor) -> Tensor | None:
        if not self._counts[microbatch]:
            return None
        if loss.dtype is not self._dtype or loss.device != self._device:
            self._dtype, self._device = loss.dtype, loss.device
            shares = torch.tensor(self._shares, dtype=torch.float64)
            self._seeds = shares.to(self._device, self._dtype).unbind()
        return self._seeds[microbatch]

    @cached_property
    def extra(self) -> Tensor:
        """At a named loss, which is a mean over the microbatches of all replicas."""
        return torch.tensor(self._of_named, dtype=torch.float64)


def sum_in_order(losses: Tensor, shares: Sequence[float]) -> float:
    """The batch's loss with the bits of a plain loop: `total = total + loss * share`, rounded at every step.

    In Python's numbers, because 128 operations on tensors of one element cost more than the step's exchange. These are
    doubles; of two floats, product and sum in doubles, rounded once more, are the floats' own (53 bits >= 2 * 24 + 2).
    """
    counted = [number for number, share in enumerate(shares) if share != 0]
    if losses.dtype not in (torch.float32, torch.float64):
        terms = [losses[number] * shares[number] for number in counted]
        return sum(terms[1:], terms[0]).item() if terms else 0.0
    rounded: Callable[[float], float] = _as_float if losses.dtype is torch.float32 else float
    result: float | None = None
    values = losses.tolist()
    for number in counted:
        term = rounded(values[number] * rounded(shares[number]))
        result = term if result is None else rounded(result + term)
    return 0.0 if result is None else result  # all 0: it is other replicas' batches that count


def _as_float(value: float) -> float:
    return c_float(value).value


def check_loss(loss: Any) -> Tensor:
    """The loss as a scalar tensor, or an error that says what it is instead."""
    if hasattr(loss, "full_tensor"):  # a DTensor: the ranks over which it is spread all need it
        loss = loss.full_tensor()
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ModelError(f"the loss is {what}; loss_fn(output, target) must return a scalar tensor, such as its mean")
    return loss


def trained_loss(loss_fn: Callable[..., Any] | None) -> Callable[..., Any]:
    """The loss of a training step, which must lead back to parameters: else `.grad` would stay empty without a word."""

    def loss_of(output: Any, target: Any, **extra: Any) -> Any:
        try:
            loss = own_loss(output) if loss_fn is None else loss_fn(output, target, **extra)
        except (TypeError, AttributeError) as error:
            if target is None:
                error.add_note("step() got no target on this rank, so loss_fn was called with target=None")
            raise
        if loss is None:
            raise ModelError(f"the loss from {_called(loss_fn)} is None, so nothing would be trained; return a scalar")
        if isinstance(loss, Tensor) and not loss.requires_grad:
            raise ModelError(
                f"the loss ({loss.dtype}, from {_called(loss_fn)}) does not require grad, so nothing would be trained; "
                f"it must depend on the parameters, without detach() and in floating point"
            )
        return loss

    return loss_of


def _called(loss_fn: Callable[..., Any] | None) -> str:
    return "the last stage" if loss_fn is None else getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__)


def own_loss(output: Any) -> Any:
    """Without a loss_fn: the output is the loss, or carries it under that name (as Hugging Face models do)."""
    if isinstance(output, Mapping):
        return output.get("loss", output)
    loss = getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else output


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

    The batch's loss of that name is the mean over microbatches, whatever `loss_reduction` says (and the sum
    over the calls in one microbatch); its gradient flows, and `result.extra_losses` reports it on every rank.
    """
    kind = run_kind()
    if kind == DRY:
        return
    if kind == EVERYWHERE:
        raise ModelError(
            f"add_loss({name!r}) was called between the units of a model that is cut by its forward; every stage runs "
            f"that code, so the loss would count several times: call it in the forward of a submodule with parameters"
        )
    collector = getattr(ExtraLosses._current, "collector", None)
    if collector is None:
        raise RunError(f"add_loss({name!r}) was called outside of a pipeline's forward")
    if not isinstance(value, Tensor) or value.dim() != 0:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ModelError(f"add_loss({name!r}, ...) got {what}; give it a scalar tensor, such as value.mean()")
    collector.found.append((name, value))
