"""One update of the weights: clipped by the norm of all gradients, left out where that is not finite.

An update may depend on all ranks, through the norm. What each rank knows by itself is its own part of the norm; what
all ranks make of the parts together is an `UpdateDecision`, the same on every rank. Nearly always it changes nothing:
the norm is finite and below the limit. `UpdateDecision.as_is` says so, and it is what an early update counts on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.runtime.optim.norms import NormAnswer, check_limit, join_norms, scale_down
from penstock.runtime.optim.snapshot import has_all, parameters_of

ORDER = 2.0


@dataclass(frozen=True)
class UpdateDecision:
    """What all ranks together make of one update.

    Attributes:
        norm: The norm of all gradients, before clipping; `None` if nobody asked for it.
        applied: Whether the update is made at all.
        as_is: Whether it is made with the gradients as they are.
    """

    norm: Tensor | None
    applied: bool
    as_is: bool


class Updates:
    """How the weights of one process are updated after each step."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: Any, clip: float | None, skip_nonfinite: bool
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer={optimizer!r}: pass one of torch's optimizers, over pipe.parameters()")
        if scheduler is not None and not callable(getattr(scheduler, "step", None)):
            raise UsageError(
                f"scheduler={scheduler!r}: pass a learning-rate scheduler, which has step(), or leave it out"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError("optimizer= is an LBFGS, which computes losses itself, by a closure; a pipeline cannot")
        if isinstance(scheduler, (type, torch.optim.lr_scheduler.ReduceLROnPlateau)):
            raise UsageError(
                f"scheduler={scheduler!r}: its step() is called without arguments, once per step; call one that needs "
                f"a loss, or that is not made yet, yourself"
            )
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", optimizer.param_groups)
        if groups is not optimizer.param_groups:
            raise UsageError("scheduler= is of another optimizer than optimizer=; make it with the one that trains")
        self.optimizer, self.scheduler = optimizer, scheduler
        self.clip = None if clip is None else check_limit("clip", clip)
        self.skip_nonfinite = skip_nonfinite
        if self.depends_on_all and scheduler is not None and not hasattr(scheduler, "load_state_dict"):
            raise UsageError(
                f"scheduler={scheduler!r} has no state_dict() and load_state_dict(), by which an update that was made "
                "too early is taken back; write them, or train without clip and skip_nonfinite"
            )

    @property
    def depends_on_all(self) -> bool:
        """Whether no rank can know by itself what the right update is."""
        return self.clip is not None or self.skip_nonfinite

    @property
    def call(self) -> str:
        """What the user has called, in which the rules that all ranks must share have their place."""
        clip = "" if self.clip is None else f"clip={float(self.clip)!r}"
        return f"train_steps({', '.join(filter(None, (clip, 'skip_nonfinite=True' if self.skip_nonfinite else '')))})"

    @property
    def can_be_taken_back(self) -> bool:
        """Whether an update changes nothing but what a snapshot has."""
        return has_all(self.optimizer)

    def check_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse an optimizer that trains none of these, the pipeline's on this process."""
        own = {id(parameter) for parameter in parameters if parameter.requires_grad}
        if own and not any(id(parameter) in own for parameter in parameters_of(self.optimizer)):
            raise UsageError(
                f"optimizer= has none of the {len(own)} parameters that the pipeline trains on this process, so it "
                f"would change nothing; make it over pipe.parameters()"
            )

    def decide(self, parts: Sequence[NormAnswer], loss: float | None) -> UpdateDecision:
        """Decide what to do, from every rank's part of the norm and the loss of the batch."""
        if not self.depends_on_all:
            return UpdateDecision(None, True, True)
        norm = join_norms(parts, ORDER)
        finite = bool(torch.isfinite(norm)) and (loss is None or math.isfinite(loss))
        applied = finite or not self.skip_nonfinite
        return UpdateDecision(norm, applied, applied and (self.clip is None or _leaves_alone(norm, self.clip)))

    def apply(self, decision: UpdateDecision, parameters: Sequence[nn.Parameter], scaler: Any = None) -> bool:
        """Update the weights as decided, and drop the gradients of all these parameters and of the optimizer's; returns
        whether the weights were updated.

        A loss scaler, which has unscaled the gradients, leaves out what overflowed.
        """
        scale = 0.0 if scaler is None else scaler.get_scale()
        if decision.applied:
            if self.clip is not None and decision.norm is not None:
                scale_down(parameters, self.clip, decision.norm, None)
            if scaler is None:
                self.optimizer.step()
            else:
                scaler.step(self.optimizer)
        if scaler is not None:
            scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        for parameter in (*parameters, *parameters_of(self.optimizer)):
            parameter.grad = None
        return decision.applied and (scaler is None or scaler.get_scale() >= scale)


AS_IS = UpdateDecision(None, True, True)  # what an early update counts on


def _leaves_alone(norm: Tensor, limit: float) -> bool:
    """Return whether torch's clipping would multiply by exactly 1."""
    return bool(torch.clamp(limit / (norm + 1e-6), max=1.0) == 1.0)
