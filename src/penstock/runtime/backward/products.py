"""Products with a parameter, taken apart: the input's gradient now, the weight's gradient later.

While a stage's forward is recorded, a mode sees every torch function that it calls. A product with a parameter
(`linear`, a convolution, `matmul`, `addmm`, `bmm`) is computed by the same kernel, but on an alias of the parameter
that autograd does not follow. So autograd's own node, in C++, yields the gradient of the input and no other; a
pre-hook on that node keeps the gradient that arrives. Input and arrived gradient are all that the weight's gradient
needs later, and the formulas below take it with the products that autograd would have taken, operand by operand and
stride by stride: that is why the result has the same bits.

Where the input needs no gradient (the first layer of the first stage, an embedding) there is nothing to do now: the
operation is left to autograd as it is, and the output is *cut* from it, to be joined again later.

Everything else passes through untouched, which is always exact: it only means that its weight gradients are taken
together with the inputs'. That holds for operations not in the table, for parameters reached through a view or a
cast, inside checkpoints (whose recomputation must not happen twice) and inside compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks as _saved_tensors_hooks
from torch._C._functorch import peek_interpreter_stack as _functorch_level

from penstock.errors import ModelError

if TYPE_CHECKING:
    from penstock.runtime.backward.split import DeferredWeights

PLAIN = (Tensor, torch.nn.Parameter)


# ---------------------------------------------------------------------------------------------------------------------
# The formulas: what autograd computes for the weight and the bias, by the same products in the same order.

Gradients: TypeAlias = tuple[Tensor, Tensor | None]  # of the weight, and of the bias if that is deferred
Formula: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None, Any], Gradients]
# of the input, the gradient that arrived, the weight, the bias if it is deferred, and options


def _as_rows(x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def _bias_gradient(bias: Tensor, gradient: Tensor) -> Tensor:
    if gradient.dim() == 2 and bias.shape == gradient.shape[1:]:
        return gradient.sum(0)  # what the next line comes to, in half the time
    return gradient.sum_to_size(bias.shape)


def _linear_gradients(x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None, flattened: Any) -> Gradients:
    rows = gradient
    if x.dim() != 2 or rows.dim() != 2:
        x, rows = _as_rows(x), _as_rows(rows)
    # Autograd lays the gradient of a product's right factor, here the transposed weight, out as the factor is.
    of_weight = rows.t().mm(x) if weight.stride() == (weight.shape[1], 1) else x.t().mm(rows).t()
    return of_weight, None if bias is None else _bias_gradient(bias, rows if flattened else gradient)


def _matmul_gradients(x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None, _: Any) -> Gradients:
    rows = _as_rows(gradient)
    of_weight = rows.t().mm(x).t() if weight.stride() == (1, weight.shape[0]) else x.t().mm(rows)
    return of_weight, None if bias is None else _bias_gradient(bias, gradient)


def _bmm_gradients(x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None, _: Any) -> Gradients:
    return x.transpose(1, 2).bmm(gradient), None


def _convolution_gradients(x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None, options: Any) -> Gradients:
    weight = weight.detach()
    if x.dim() < weight.dim():  # without a batch dimension
        x, gradient = x.unsqueeze(0), gradient.unsqueeze(0)
    if weight.dtype != x.dtype:  # under autocast; only its shape and layout matter here
        weight = weight.to(x.dtype)
    stride, padding, dilation, groups = options
    _, of_weight, of_bias = torch.ops.aten.convolution_backward(
        gradient, x, weight, None if bias is None else list(bias.shape), stride, padding, dilation,
        False, [0] * len(stride), groups, [False, True, bias is not None],
    )  # fmt: skip
    return of_weight, None if bias is None else of_bias


# ---------------------------------------------------------------------------------------------------------------------
# The rules: one for each function in the table; `None` says "not here: run it as it is".


class _Call:
    """A call as it was made, and as the kernel shall see it: without history, and cast where autocast would cast."""

    __slots__ = ("args", "bias", "func", "kwargs", "options", "weight", "x")
    x: Tensor
    weight: Tensor
    bias: Tensor | None

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Any = None) -> None:
        self.func, self.args, self.kwargs, self.options = func, args, kwargs, options

    def split(
        self, deferred: DeferredWeights, x: Any, weight: Any, bias: Any, compute: Compute, formula: Formula
    ) -> Any:
        if not _may_defer(deferred, x, weight, bias):
            return None
        deferred_bias = bias if bias is not None and deferred.takes(bias) else None
        if not x.requires_grad:  # nothing is due now, so all of it waits
            if deferred_bias is None and bias is not None and bias.requires_grad:
                return None
            parameters = (weight,) if deferred_bias is None else (weight, deferred_bias)
            return deferred.cut(parameters, self.func(*self.args, **self.kwargs))
        self.x, self.weight, self.bias = x, weight.detach(), bias if deferred_bias is None else deferred_bias.detach()
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            self.x, self.weight = cast(x, dtype), deferred.cast(weight, dtype)
            self.bias = self.bias if deferred_bias is None else deferred.cast(deferred_bias, dtype)
        output = compute(self)
        return deferred.keep(output, formula, self.x, weight, deferred_bias, self.options)


Compute: TypeAlias = Callable[[_Call], Tensor]


def _may_defer(deferred: DeferredWeights, x: Any, weight: Any, bias: Any) -> bool:
    """Whether a product may be taken apart here: that it may be at all, and that its weight is known to allow it."""
    if (
        not torch.is_grad_enabled()
        or type(x) not in PLAIN
        or _saved_tensors_hooks(False) is not None  # a checkpoint or an offload: what is saved is not ours to keep
        or _functorch_level() is not None
    ):
        return False
    status = deferred.parameters.status(weight)
    if status is None and deferred.note(weight):
        deferred.note(bias)
    return status is True and bool(weight.requires_grad)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast casts an operand: floating point, but never double."""
    return x if x.dtype in (dtype, torch.float64) or not x.is_floating_point() else x.to(dtype)


def _arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """The call's arguments by position, missing ones None; None where the call has others than those named."""
    found = [*args, *[None] * (len(names) - len(args))]
    for name, value in kwargs.items():
        if name not in names:
            return None
        found[names.index(name)] = value
    return found if len(found) == len(names) else None


def _linear(deferred: DeferredWeights, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _arguments(("input", "weight", "bias"), args, kwargs) if kwargs or len(args) != 3 else args
    if found is None or found[1].dim() != 2:
        return None
    x, weight, bias = found
    return _Call(func, args, kwargs).split(deferred, x, weight, bias, _linear_output, _linear_gradients)


def _linear_output(call: _Call) -> Tensor:
    x, weight, bias = call.x, call.weight, call.bias
    call.options = x.dim() == 2 or x.is_contiguous()  # whether `linear` adds the bias to rows
    output: Tensor
    if call.options or x.dim() == 1:
        output = call.func(x, weight, bias)
        return output
    # `linear` folds such an input only for a weight that needs a gradient, which it now does not see.
    call.x = x.flatten(0, -2)
    output = call.x.mm(weight.t()).view(*x.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias


def _matmul(deferred: DeferredWeights, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or type(args[0]) not in PLAIN or type(args[1]) not in PLAIN:
        return None
    x, weight = args
    if weight.dim() != 2 or x.dim() < 2:
        return None
    return _Call(func, args, kwargs).split(deferred, x, weight, None, _matmul_output, _matmul_gradients)


def _matmul_output(call: _Call) -> Tensor:
    x = call.x
    if x.dim() == 2:
        return x.mm(call.weight)
    call.x = x.flatten(0, -2)
    return call.x.mm(call.weight).view(*x.shape[:-1], call.weight.shape[1])


def _addmm(deferred: DeferredWeights, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3:
        return None
    bias, x, weight = args
    return _Call(func, args, kwargs).split(deferred, x, weight, bias, _addmm_output, _matmul_gradients)


def _addmm_output(call: _Call) -> Tensor:
    assert call.bias is not None
    return torch.addmm(call.bias, call.x, call.weight)


def _bmm(deferred: DeferredWeights, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2:
        return None
    x, weight = args
    return _Call(func, args, kwargs).split(deferred, x, weight, None, _bmm_output, _bmm_gradients)


def _bmm_output(call: _Call) -> Tensor:
    return torch.bmm(call.x, call.weight)


_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def _convolution(deferred: DeferredWeights, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _arguments(_CONVOLUTION, args, kwargs)
    if found is None or (isinstance(found[4], str) and found[4] != "valid"):
        return None  # "same" may pad one side more than the other, by an operation of its own
    x, weight, bias, stride, padding, dilation, groups = found
    count = weight.dim() - 2
    padding = None if isinstance(padding, str) else padding
    options = (_each(stride, count, 1), _each(padding, count, 0), _each(dilation, count, 1), groups or 1)
    return _Call(func, args, kwargs, options).split(
        deferred, x, weight, bias, _convolution_output, _convolution_gradients
    )


def _convolution_output(call: _Call) -> Tensor:
    output: Tensor = call.func(call.x, call.weight, call.bias, *call.options)
    return output


def _each(value: Any, count: int, default: int) -> list[int]:
    if value is None:
        return [default] * count
    return [value] * count if isinstance(value, int) else list(value) * (count if len(value) == 1 else 1)


def _embedding(deferred: DeferredWeights, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) < 2 or not _may_defer(deferred, args[0], args[1], None):
        return None
    return deferred.cut((args[1],), func(*args, **kwargs))


def _attention(deferred: DeferredWeights, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`nn.MultiheadAttention` hands itself to the mode as one function; its products are inside.

    The function asks first whether a mode wants it and would be handed back for ever; so the same code runs with that
    question answered by no, with the mode on for what it calls.
    """
    if any(isinstance(value, Tensor) and type(value) not in PLAIN for value in (*args, *kwargs.values())):
        return None  # a subclass of Tensor may want to be asked
    unasked = FunctionType(
        func.__code__, {**func.__globals__, "has_torch_function": lambda _: False}, func.__name__, func.__defaults__
    )
    with deferred.mode():
        return unasked(*args, **kwargs)


def _inner_gradient(deferred: DeferredWeights, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward that differentiates needs the parameters in its graph: such a stage is not taken apart."""
    if deferred.uses:
        raise ModelError(
            f"a stage's forward calls {func.__qualname__} after {len(deferred.uses)} of its operations were split into "
            f"input and weight gradients, and in earlier microbatches it did not; choose a schedule without W for it"
        )
    deferred.parameters.differentiates = True


Rule: TypeAlias = Callable[["DeferredWeights", Any, tuple[Any, ...], dict[str, Any]], Any]

RULES: dict[Any, Rule] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _matmul),
    torch.addmm: _addmm,
    torch.bmm: _bmm,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    F.embedding: _embedding,
    F.multi_head_attention_forward: _attention,
    **dict.fromkeys((torch.autograd.grad, Tensor.backward), _inner_gradient),
}
