"""Units that run twice because the model's code checkpoints their calls.

In the backward a checkpoint calls its function once more. Where that calls a unit of this stage, the unit runs as it
did before, with the same random numbers. Other stages' units cannot run again, nor can a checkpoint's own forward be
without gradients while the stage's is to have them: what it emits from inside would be cut off from the parameters.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from penstock.errors import ModelError

_APPLY: Any = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def cannot_repeat(name: str) -> ModelError:
    """The error for a unit call in a backward that cannot be made."""
    return ModelError(
        f"the model's code checkpoints the call of {name}, and so code of other stages with it; let the unit "
        f"checkpoint itself, in its own forward, or leave that to Pipeline(recompute='always')"
    )


def check_reentrant(name: str, with_gradients: bool) -> None:
    """A unit is called: not from inside of a function that runs without gradients and puts them in later."""
    if not with_gradients or torch.is_grad_enabled():
        return
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            raise ModelError(
                f"the model's code calls {name} inside of a torch.autograd.Function (a checkpoint with "
                f"use_reentrant=True, a reversible network), which hides the gradients of what this stage sends on; "
                f"pass use_reentrant=False, or let that function and what it calls be one module"
            )
        frame = frame.f_back
