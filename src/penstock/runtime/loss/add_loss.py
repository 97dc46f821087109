"""Losses from inside stages, such as a balance loss of experts."""

from __future__ import annotations

from torch import Tensor

from penstock.errors import ModelError, RunError
from penstock.model.run_kind import DRY, EVERYWHERE, run_kind
from penstock.runtime.state.phase import NOW


def add_loss(name: str, value: Tensor) -> None:
    """Add a loss from inside any stage's forward, such as a balance loss of experts.

    Its gradient flows, and `result.extra_losses` reports it on every rank. The batch's loss of that name is the mean
    over microbatches, whatever `LossOptions` says, and the sum over the calls within one microbatch.

    Args:
        name: The name to report it under.
        value: A tensor with one element.
    """
    kind = run_kind()
    if kind == DRY:
        return
    if kind == EVERYWHERE:
        raise ModelError(
            f"add_loss({name!r}) was called between the units of a model that is cut by its forward; every stage runs "
            f"that code, so the loss would count several times: call it in the forward of a submodule with parameters"
        )
    phase = NOW.phase
    if phase is None or phase.kind == "backward":
        raise RunError(f"add_loss({name!r}) was called outside of a pipeline's forward")
    if not isinstance(value, Tensor) or value.dim() != 0:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ModelError(f"add_loss({name!r}, ...) got {what}; give it a scalar tensor, such as value.mean()")
    phase.extra.append((name, value))
