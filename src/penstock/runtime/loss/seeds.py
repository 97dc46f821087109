"""What enters the backward at losses, and the sum that they make.

A gradient is right when its seed is: each microbatch's loss is seeded with its share of the batch, and `.grad` is never
touched afterwards. So several steps before one optimizer step just add, tied parameters are not scaled twice, and hooks
see final numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_float
from functools import cached_property

import torch
from torch import Tensor

from penstock.runtime.loss.shares import Shares

__all__ = ["Seeds", "sum_in_order"]


class Seeds:
    """What enters the backward at each microbatch's loss: its share, as a tensor like the loss.

    All of them are made at once, when the first loss shows its kind: one by one they cost more than a small backward.
    A microbatch without a share takes no part: its own mean may well be nan, and 0 * nan would reach the weights.
    """

    def __init__(self, shares: Shares, count: int, scale: float = 1.0, replicas: int = 1) -> None:
        self._shares, self._scale = shares, scale
        self._dtype: torch.dtype | None = None
        self._device: torch.device | None = None
        self._seeds: tuple[Tensor | None, ...] = ()
        self._of_named = scale / (count * replicas)

    def of(self, microbatch: int, loss: Tensor) -> Tensor | None:
        """The seed of one loss; None where it does not count."""
        if loss.dtype is not self._dtype or loss.device != self._device:
            if not self._shares.counts(microbatch):
                return None
            self._dtype, self._device = loss.dtype, loss.device
            shares = self._shares()
            seeds = torch.tensor([share * self._scale for share in shares], dtype=torch.float64)
            made = seeds.to(self._device, self._dtype).unbind()
            self._seeds = tuple(seed if share else None for seed, share in zip(made, shares, strict=True))
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
