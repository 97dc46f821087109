"""Parameters that others have taken the place of: a shard, a part, or values for one that had none.

An optimizer that was made before that happened still has the old ones. They never get a gradient again, and optimizers
pass over parameters without one: such a loop trains nothing, or a part of the model, and its loss may even fall. So the
old ones are marked, and an optimizer that steps on one is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from penstock.errors import UsageError

MARK = "_penstock_replaced"
_watching: list[Any] = []  # torch's handle, once there is something to look for


def mark_replaced(parameters: Iterable[nn.Parameter]) -> None:
    """Mark parameters in whose place others stand now."""
    for parameter in parameters:
        parameter.__dict__[MARK] = True
        if not _watching:
            _watching.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if MARK in parameter.__dict__:
                raise UsageError(
                    f"this {type(optimizer).__name__} was made before the Pipeline, which has replaced the "
                    f"parameters that it holds, so it would train nothing; make it afterwards, from pipe.parameters()"
                )
