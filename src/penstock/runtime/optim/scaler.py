"""Loss scaling for float16: torch's own GradScaler, with one opinion for all ranks.

Gradients of float16 forwards vanish unless the loss is scaled up, and overflow where it is scaled too far. A step that
has overflowed must be left out, by all ranks or by none: a model of which half has stepped is broken for good. So the
ranks tell each other what they found, before any of them steps, and everything after that is torch's own logic.

`pipe.step()` scales the seeds of the backward, so that losses stay what they are and `.grad` is what is scaled.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from penstock.errors import UsageError
from penstock.runtime.optim.norms import local_part

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

CALL = "GradScaler.unscale_()"


class LossScale(Protocol):
    """What may scale the seeds of a pipeline's backward: `pipe.state.scaler`."""

    def loss_scale(self) -> float:
        """Return what the next step's loss is multiplied by."""

    def check_unscaled(self, call: str) -> None:
        """Raise where gradients are not what they will be when the optimizer steps."""


class GradScaler(torch.amp.GradScaler):
    """Scales the loss of a pipeline's steps, for fp16. `unscale_`, `step`, `update` and `state_dict` are as in torch.

    ::

        scaler = GradScaler(pipe)
        pipe.step(x, target=y)
        scaler.step(optimizer)
        scaler.update()

    Use it on every rank: `unscale_` and `step` find out together whether any rank's gradients are inf or NaN.

    Args:
        pipe: The pipeline whose loss is scaled.
        init_scale: The scale to start with.
        growth_factor: What the scale is multiplied by after `growth_interval` steps without inf or NaN.
        backoff_factor: What the scale is multiplied by after a step with inf or NaN.
        growth_interval: The number of good steps after which the scale grows.
        enabled: Whether to scale at all.
    """

    def __init__(
        self,
        pipe: Pipeline,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        _check(init_scale, growth_factor, backoff_factor, growth_interval)
        trained = ((name, each) for name, each in pipe.named_parameters() if each.requires_grad)
        half = next((name for name, each in trained if each.dtype == torch.float16), None)
        if enabled and half is not None:
            raise UsageError(
                f"{half} has dtype float16, and scaled gradients must be float32 to be unscaled; keep the weights in "
                f'float32 (model.dtype = "float32" in a configuration): precision="fp16" converts them in each forward'
            )
        self._pipe = pipe
        device = next(pipe.parameters()).device
        super().__init__(device.type, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        if self.is_enabled():
            self._lazy_init_scale_growth_tracker(device)
        pipe.state.scaler = self

    def loss_scale(self) -> float:
        """Return the factor of the next step's loss; raise if its gradients would be added to unscaled ones."""
        if not self.is_enabled():
            return 1.0
        if self._pipe.deployment.ranks.transactions[0].has_hooks():
            raise UsageError(
                f"register_post_accumulate_grad_hook on a parameter would be called with a gradient that is scaled by "
                f"{self.get_scale():g}, before the ranks know whether it is finite; leave the optimizer to "
                f"scaler.step(optimizer), or train without loss scaling: bf16 needs none"
            )
        if self._done():
            raise UsageError(
                "the gradients of the last step are unscaled already, and this step's would be added to them; call "
                "scaler.step(optimizer) and scaler.update() first, and unscale only when all steps have been added"
            )
        return self.get_scale()

    def check_unscaled(self, call: str) -> None:
        """Raise if gradients are still scaled: their norm would be that of the scale, so they must not be clipped.

        Args:
            call: The name of the call that needs unscaled gradients, for the message.
        """
        if self.is_enabled() and not self._done():
            raise UsageError(
                f"{call} on gradients that are scaled by {self.get_scale():g}; call scaler.unscale_(optimizer) first"
            )

    def _done(self) -> bool:
        states = self._per_optimizer_states.values()
        return any(state["stage"] is not OptState.READY for state in states)

    def scale(self, outputs: Any) -> NoReturn:
        """Raise an error: the pipeline scales the loss itself.

        Args:
            outputs: Not used.
        """
        raise UsageError("pipe.step() scales the loss of a pipeline that has a GradScaler; leave scaler.scale() out")

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if self._pipe.state.scaler is not self:
            raise UsageError("the pipeline has another GradScaler by now; use that one")
        held: Any = [local_part(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        local: Any = SimpleNamespace(param_groups=[{"params": held}])
        found = super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16)
        some = bool(found)
        found = found or {found_inf.device: found_inf}  # a rank without gradients has no objection
        mine = (any(bool(each.item()) for each in found.values()), some, self.get_scale())
        ranks = self._pipe.deployment.world.all_gather(CALL, self._pipe.deployment.replication.all_gather(CALL, mine))
        answers = [each for copies in ranks for each in copies]
        if not any(some for _, some, _ in answers):
            raise UsageError(
                "no rank has a gradient to unscale; call pipe.step() before, with this optimizer's parameters"
            )
        if len({scale for *_, scale in answers}) > 1:
            listed = ", ".join(
                f"rank {rank}: {' and '.join(f'{scale:g}' for scale in dict.fromkeys(scale for *_, scale in copies))}"
                for rank, copies in enumerate(ranks)
            )
            raise UsageError(
                f"the ranks' losses were scaled differently ({listed}), so this step's gradients are of no use; make "
                f"and load the GradScaler alike on every rank"
            )
        agreed = float(any(bad for bad, *_ in answers))
        return {device: torch.full_like(each, agreed) for device, each in found.items()}


def _check(init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int) -> None:
    rules = (
        ("init_scale", init_scale, 0 < init_scale < math.inf, "above 0"),
        ("growth_factor", growth_factor, growth_factor > 1, "above 1"),
        ("backoff_factor", backoff_factor, 0 < backoff_factor < 1, "between 0 and 1"),
        ("growth_interval", growth_interval, growth_interval >= 1, "1 or more"),
    )
    for name, value, fits, would_work in rules:
        if not fits:
            raise UsageError(f"{name}={value!r}: it must be {would_work}")
