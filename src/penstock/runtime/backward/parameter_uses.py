"""What is put off until W: uses of a parameter, and how its gradient is taken from them.

A `Use` is a product whose input is kept until the gradient of its output has arrived; one of the formulas below then
takes the weight's gradient with the products that autograd would have taken, operand by operand and stride by stride.
A `Cut` is an operation that was left to autograd as it is: its whole graph waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

if TYPE_CHECKING:
    from penstock.runtime.backward.split import DeferredWeights

Add: TypeAlias = Callable[[Tensor, Tensor], None]
Formula: TypeAlias = Callable[["Use", Tensor, Add], None]


class Use:
    """One product whose weight gradient is taken later. As a pre-hook of its node, it receives the gradient."""

    __slots__ = ("bias", "formula", "options", "tape", "version", "weight", "x")

    def __init__(
        self,
        tape: DeferredWeights,
        formula: Formula,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: Any = None,
    ) -> None:
        self.tape = tape
        self.formula = formula
        # An alias without history: holding the input must not hold the graph that made it.
        self.x: Tensor | None = x.detach()
        self.version = x._version
        self.weight = weight
        self.bias = bias
        self.options = options

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        gradient = gradients[0]
        if gradient is not None:
            self.tape.arrived(self, gradient)

    def input(self) -> Tensor:
        x = self.x
        assert x is not None, "a use is evaluated once"
        if x._version != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"input of shape {list(x.shape)} to a parameter of shape {list(self.weight.shape)} is at version "
                f"{x._version}; expected version {self.version} instead"
            )
        return x

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def free(self) -> None:
        self.x = None


class Cut:
    """An operation on nothing but parameters: autograd's own graph of it, waiting for its gradient."""

    __slots__ = ("edge", "parameters", "tape")

    def __init__(self, tape: DeferredWeights, parameters: tuple[Tensor, ...]) -> None:
        self.tape = tape
        self.edge: GradientEdge | None = None
        self.parameters = parameters

    def apart(self, output: Tensor) -> Tensor:
        """The output without the graph behind it; its gradient comes here."""
        self.edge = get_gradient_edge(output)
        self.tape.uses.append(self)
        joined: Tensor = _CutFunction.apply(_ANCHOR, (output.detach(),), self)  # type: ignore[no-untyped-call]
        return joined

    def free(self) -> None:
        self.edge = None


class _CutFunction(torch.autograd.Function):
    """The identity whose gradient stops here and waits. It hangs on an anchor, so that its backward runs at all."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, output: tuple[Tensor], cut: Cut) -> Tensor:
        ctx.cut = cut
        ctx.set_materialize_grads(False)
        return output[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        if gradients[0] is not None:
            ctx.cut.tape.arrived(ctx.cut, gradients[0])
        return None, None, None


_ANCHOR = torch.zeros((), requires_grad=True)


# ---------------------------------------------------------------------------------------------------------------------
# The formulas: what autograd computes for the weight and the bias, by the same products in the same order.


def _as_rows(x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def _bias_gradient(bias: Tensor, gradient: Tensor) -> Tensor:
    if gradient.dim() == 2 and bias.shape == gradient.shape[1:]:
        return gradient.sum(0)  # what the next line comes to, in half the time
    return gradient.sum_to_size(bias.shape)


def linear_gradients(use: Use, gradient: Tensor, add: Add) -> None:
    x, rows, weight, bias = use.input(), gradient, use.weight, use.bias
    if x.dim() != 2 or rows.dim() != 2:
        x, rows = _as_rows(x), _as_rows(rows)
    # Autograd lays the gradient of a product's right factor, here the transposed weight, out as the factor is.
    add(weight, rows.t().mm(x) if weight.stride() == (weight.shape[1], 1) else x.t().mm(rows).t())
    if bias is not None:
        flattened = use.options
        add(bias, _bias_gradient(bias, rows if flattened else gradient))


def matmul_gradients(use: Use, gradient: Tensor, add: Add) -> None:
    x, rows, weight = use.input(), _as_rows(gradient), use.weight
    add(weight, rows.t().mm(x).t() if weight.stride() == (1, weight.shape[0]) else x.t().mm(rows))
    if use.bias is not None:
        add(use.bias, _bias_gradient(use.bias, gradient))


def bmm_gradients(use: Use, gradient: Tensor, add: Add) -> None:
    add(use.weight, use.input().transpose(1, 2).bmm(gradient))


def convolution_gradients(use: Use, gradient: Tensor, add: Add) -> None:
    x, weight, bias = use.input(), use.weight.detach(), use.bias
    if x.dim() < weight.dim():  # without a batch dimension
        x, gradient = x.unsqueeze(0), gradient.unsqueeze(0)
    if weight.dtype != x.dtype:  # under autocast; only its shape and layout matter here
        weight = weight.to(x.dtype)
    stride, padding, dilation, groups = use.options
    _, of_weight, of_bias = torch.ops.aten.convolution_backward(
        gradient, x, weight, None if bias is None else list(bias.shape), stride, padding, dilation,
        False, [0] * len(stride), groups, [False, True, bias is not None],
    )  # fmt: skip
    add(use.weight, of_weight)
    if bias is not None:
        add(bias, of_bias)
