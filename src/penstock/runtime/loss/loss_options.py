"""How the losses of microbatches count in the loss of their batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.errors import UsageError
from penstock.rules import ArgumentRule, check_rules, choice

RULES = {
    "weight": ArgumentRule(
        callable,
        "pass a function that returns a number, of the target or of anything that step() is passed, by name",
    ),
    "reduction": choice(None, "mean", "sum"),
    "per_microbatch": choice(False, True),
}


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """How the losses of microbatches make the loss of the batch, such as `LossOptions(reduction="sum")`.

    By default the loss of a batch is what a plain loop over the whole batch would compute; where that cannot be known,
    the first step says so.

    Args:
        weight: A function that counts what a microbatch's loss is a mean over. Its arguments are the target, or
            anything that `step()` is passed, by name: `lambda labels: (labels != -100).sum()`.
        reduction: `"mean"` or `"sum"`, where the loss function does not show which it is.
        per_microbatch: Whether the batch's loss is the mean of its microbatches' losses by rows, although the loss of
            the batch in one piece would be another number.
    """

    weight: Callable[..., Any] | None = None
    reduction: str | None = None
    per_microbatch: bool = False

    def __post_init__(self) -> None:
        check_rules(vars(self), RULES, "LossOptions")
        if self.weight is not None and self.reduction == "sum":
            raise UsageError(
                "LossOptions(weight=) weighs the terms of a mean; with reduction='sum' all count alike: leave one out"
            )
