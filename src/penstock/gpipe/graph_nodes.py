"""The two nodes that a call has in the user's graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from penstock.gpipe.calls import ForwardCall

__all__ = ["Outputs", "Stages"]


class Stages(torch.autograd.Function):
    """All stages of a call, from what wants a gradient to a token; behind it, `Outputs` gives the outputs.

    Two nodes, because autograd goes back through a node on the thread of the gradients' device. There nothing may wait
    for the stages, whose own backwards need that thread. So `Outputs` only takes the gradients, and the token, which
    is on the CPU, brings the thread that has called backward() here.
    """

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, *sources: Tensor) -> Tensor:
        ctx.call = call
        return torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        with ctx.call.calls.turn:
            return (None, *ctx.call.backward())


class Outputs(torch.autograd.Function):
    """The outputs of a call; its backward only takes their gradients."""

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, token: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs, call.outputs = tuple(call.outputs), []
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor]:
        ctx.call.arrived = gradients
        return None, torch.zeros(())
