"""The products with a parameter that a split backward takes apart, in one table.

While a stage's forward is recorded, `DeferringMode` sees every torch function that it calls. A product with a parameter
(`linear`, a convolution, `matmul`, `addmm`, `bmm`) is computed by the same kernel, but on an alias of the parameter
that autograd does not follow. So autograd's own node, in C++, yields the gradient of the input and no other. Input and
arrived gradient are all that the weight's gradient needs later, and its formula takes it with the products that
autograd would have taken, operand by operand and stride by stride: that is why the result has the same bits.

`PRODUCTS`, at the end, has for each of torch's functions how a call of it is read, how it is computed on operands
without history, and the formula of its weight's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)  # what may be taken apart: a subclass of Tensor may want to see each operation

# Gradients of the weight, and of the bias if that is deferred.
Gradients: TypeAlias = tuple[Tensor, Tensor | None]
Formula: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None, Any], Gradients]
# Takes the input, the gradient that arrived, the weight, the bias if it is deferred, and options.


class _Operands(NamedTuple):
    """The operands of a product in the call that was made."""

    x: Any
    weight: Any
    bias: Any = None
    options: Any = None


class Product(NamedTuple):
    """One of torch's functions that multiply by a parameter."""

    read: Callable[[tuple[Any, ...], dict[str, Any]], _Operands | None]  # None: not a call to take apart
    compute: Callable[[Any, Tensor, Tensor, Tensor | None, Any], tuple[Tensor, Tensor, Any]]
    formula: Formula
    # `compute` returns the output, and the input and the options as the formula needs them


def _arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return the call's arguments by position, missing ones None; None where the call has others than those named."""
    found = [*args, *[None] * (len(names) - len(args))]
    for name, value in kwargs.items():
        if name not in names:
            return None
        found[names.index(name)] = value
    return found if len(found) == len(names) else None


# -- parts of several formulas


def _as_rows(x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def _bias_gradient(bias: Tensor, gradient: Tensor) -> Tensor:
    if gradient.dim() == 2 and bias.shape == gradient.shape[1:]:
        return gradient.sum(0)  # what the next line comes to, in half the time
    return gradient.sum_to_size(bias.shape)


# -- linear


def _read_linear(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Operands | None:
    found = _arguments(("input", "weight", "bias"), args, kwargs) if kwargs or len(args) != 3 else args
    return None if found is None or found[1].dim() != 2 else _Operands(*found)


def _linear(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, _: Any) -> tuple[Tensor, Tensor, Any]:
    flattened = x.dim() == 2 or x.is_contiguous()  # whether `linear` adds the bias to rows
    if flattened or x.dim() == 1:
        return func(x, weight, bias), x, flattened
    # `linear` folds such an input only for a weight that needs a gradient, which it now does not see.
    rows = x.flatten(0, -2)
    output = rows.mm(weight.t()).view(*x.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias, rows, flattened


def _linear_gradients(x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None, flattened: Any) -> Gradients:
    rows = gradient
    if x.dim() != 2 or rows.dim() != 2:
        x, rows = _as_rows(x), _as_rows(rows)
    # Autograd lays the gradient of a product's right factor, here the transposed weight, out as the factor is.
    of_weight = rows.t().mm(x) if weight.stride() == (weight.shape[1], 1) else x.t().mm(rows).t()
    return of_weight, None if bias is None else _bias_gradient(bias, rows if flattened else gradient)


# -- matmul, mm, addmm


def _read_matmul(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Operands | None:
    if kwargs or len(args) != 2 or type(args[0]) not in PLAIN or type(args[1]) not in PLAIN:
        return None
    x, weight = args
    return None if weight.dim() != 2 or x.dim() < 2 else _Operands(x, weight)


def _matmul(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, _: Any) -> tuple[Tensor, Tensor, Any]:
    if x.dim() == 2:
        return x.mm(weight), x, None
    rows = x.flatten(0, -2)
    return rows.mm(weight).view(*x.shape[:-1], weight.shape[1]), rows, None


def _read_addmm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Operands | None:
    return None if kwargs or len(args) != 3 else _Operands(args[1], args[2], args[0])


def _addmm(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, _: Any) -> tuple[Tensor, Tensor, Any]:
    assert bias is not None
    return torch.addmm(bias, x, weight), x, None


def _matmul_gradients(x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None, _: Any) -> Gradients:
    rows = _as_rows(gradient)
    of_weight = rows.t().mm(x).t() if weight.stride() == (1, weight.shape[0]) else x.t().mm(rows)
    return of_weight, None if bias is None else _bias_gradient(bias, gradient)


# -- bmm


def _read_bmm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Operands | None:
    return None if kwargs or len(args) != 2 else _Operands(*args)


def _bmm(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, _: Any) -> tuple[Tensor, Tensor, Any]:
    return torch.bmm(x, weight), x, None


def _bmm_gradients(x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None, _: Any) -> Gradients:
    return x.transpose(1, 2).bmm(gradient), None


# -- convolutions


_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def _read_convolution(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Operands | None:
    found = _arguments(_CONVOLUTION, args, kwargs)
    if found is None or (isinstance(found[4], str) and found[4] != "valid"):
        return None  # "same" may pad one side more than the other, by an operation of its own
    x, weight, bias, stride, padding, dilation, groups = found
    count = weight.dim() - 2
    padding = None if isinstance(padding, str) else padding
    options = (_each(stride, count, 1), _each(padding, count, 0), _each(dilation, count, 1), groups or 1)
    return _Operands(x, weight, bias, options)


def _convolution(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: Any) -> tuple[Tensor, Tensor, Any]:
    return func(x, weight, bias, *options), x, options


def _each(value: Any, count: int, default: int) -> list[int]:
    if value is None:
        return [default] * count
    return [value] * count if isinstance(value, int) else list(value) * (count if len(value) == 1 else 1)


def _convolution_gradients(x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None, options: Any) -> Gradients:
    weight = weight.detach()
    if x.dim() < weight.dim():  # It has no batch dimension.
        x, gradient = x.unsqueeze(0), gradient.unsqueeze(0)
    # This happens under autocast; only its shape and layout matter here.
    if weight.dtype != x.dtype:
        weight = weight.to(x.dtype)
    stride, padding, dilation, groups = options
    _, of_weight, of_bias = torch.ops.aten.convolution_backward(
        gradient, x, weight, None if bias is None else list(bias.shape), stride, padding, dilation,
        False, [0] * len(stride), groups, [False, True, bias is not None],
    )  # fmt: skip
    return of_weight, None if bias is None else of_bias


PRODUCTS: dict[Any, Product] = {
    F.linear: Product(_read_linear, _linear, _linear_gradients),
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm),
        Product(_read_matmul, _matmul, _matmul_gradients),
    ),
    torch.addmm: Product(_read_addmm, _addmm, _matmul_gradients),
    torch.bmm: Product(_read_bmm, _bmm, _bmm_gradients),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), Product(_read_convolution, _convolution, _convolution_gradients)),
}
