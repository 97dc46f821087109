"""Products with a parameter, taken apart: the input's gradient now, the weight's gradient later.

While a stage's forward is recorded, a mode sees every torch function that it calls. A product with a parameter
(`linear`, a convolution, `matmul`, `addmm`, `bmm`) is computed by the same kernel, but on an alias of the parameter
that autograd does not follow. So autograd's own node, in C++, yields the gradient of the input and no other; a
pre-hook on that node keeps the gradient that arrives. Input and arrived gradient are all that the weight's gradient
needs later, and the formulas in `split` take it with the products that autograd would have taken, operand by operand
and stride by stride: that is why the result has the same bits.

Where the input needs no gradient (the first layer of the first stage, an embedding) there is nothing to do now: the
operation is left to autograd as it is, and the output is *cut* from it, to be joined again later.

Everything else passes through untouched, which is always exact: it only means that its weight gradients are taken
together with the inputs'. That holds for operations not in the table, for parameters reached through a view or a
cast, inside checkpoints (whose recomputation must not happen twice) and inside compiled code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks as _saved_tensors_hooks
from torch._C._functorch import peek_interpreter_stack as _functorch_level
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from penstock.runtime.backward.graph_leaves import uses_in_graph
from penstock.runtime.backward.other_operations import RULES
from penstock.runtime.backward.split import (
    DeferredWeights,
    Formula,
    bmm_gradients,
    convolution_gradients,
    linear_gradients,
    matmul_gradients,
)
from penstock.runtime.backward.stage_parameters import PLAIN, StageParameters

_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class DeferredProduct:
    """One product whose weight gradient is taken later, from its input and the gradient that arrives."""

    __slots__ = ("bias", "formula", "options", "version", "weight", "x")

    def __init__(self, formula: Formula, x: Tensor, weight: Tensor, bias: Tensor | None, options: Any) -> None:
        self.formula = formula
        # An alias without history: holding the input must not hold the graph that made it.
        self.x: Tensor | None = x.detach()
        self.version = x._version
        self.weight = weight
        self.bias = bias
        self.options = options

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class DeferredSubgraph:
    """An operation on nothing but parameters: autograd's own graph of it, waiting for its gradient."""

    __slots__ = ("deferred", "edge", "parameters")

    def __init__(self, deferred: DeferredWeights, parameters: tuple[Tensor, ...], edge: GradientEdge) -> None:
        self.deferred = deferred
        self.edge: GradientEdge | None = edge
        self.parameters = parameters


class _CutFunction(torch.autograd.Function):
    """The identity whose gradient stops here and waits. It hangs on an anchor, so that its backward runs at all."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, output: tuple[Tensor], subgraph: DeferredSubgraph) -> Tensor:
        ctx.subgraph = subgraph
        ctx.set_materialize_grads(False)
        return output[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        if gradients[0] is not None:
            ctx.subgraph.deferred.arrived_at_subgraph(ctx.subgraph, gradients[0])
        return None, None, None


_ANCHOR = torch.zeros((), requires_grad=True)


class DeferringMode(TorchFunctionMode):
    """On during the forward of one microbatch, in the thread that runs it; fills `deferred`."""

    def __init__(self, parameters: StageParameters) -> None:
        super().__init__()
        self.deferred = DeferredWeights()
        self.parameters = parameters
        self.candidates: dict[int, Tensor] = {}  # parameters of which it is not known yet whether they can wait
        self.casts: dict[tuple[int, torch.dtype], Tensor] = {}  # parameters as autocast gives them, cast once
        self._uses: Counter[int] = Counter()  # of the candidates, that could wait

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        # The compiler inlines a mode into what it compiles; there, this one shall be nothing at all.
        if not torch.compiler.is_compiling():
            product, rule = PRODUCTS.get(func), RULES.get(func)
            output = None
            if product is not None:
                output = self._product(product, func, args, kwargs or {})
            elif rule is not None:
                output = rule(self, func, args, kwargs or {})
            if output is not None:
                return output
        return func(*args, **kwargs) if kwargs else func(*args)

    def _product(self, product: _Product, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The output of a product whose weight gradient waits; None where it is to run as it is."""
        operands = product.read(args, kwargs)
        if operands is None or not self.may_split(operands.x):
            return None
        x, own, own_bias, options = operands
        if not self.can_wait(own):
            if own_bias is not None and id(own) in self.candidates:
                self.can_wait(own_bias)
            return None
        waiting_bias = own_bias if own_bias is not None and self.can_wait(own_bias) else None
        if not x.requires_grad:  # nothing is due now, so all of it waits
            if waiting_bias is None and own_bias is not None and own_bias.requires_grad:
                return None
            return self.cut((own,) if waiting_bias is None else (own, waiting_bias), func(*args, **kwargs))
        weight, bias = own.detach(), own_bias if waiting_bias is None else waiting_bias.detach()
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = _cast(x, dtype), self._cast_once(own, dtype)
            bias = bias if waiting_bias is None else self._cast_once(waiting_bias, dtype)
        output, x, options = product.compute(func, x, weight, bias, options)
        waiting = DeferredProduct(product.formula, x, own, waiting_bias, options)
        output.grad_fn.register_prehook(partial(self.deferred.arrived, waiting))  # type: ignore[union-attr]
        self.deferred.products.append(waiting)
        return output

    @staticmethod
    def may_split(x: Any) -> bool:
        """Whether an operation on this input may be taken apart here at all.

        In a checkpoint or an offload, what is saved is not ours to keep.
        """
        if not torch.is_grad_enabled() or type(x) not in PLAIN:
            return False
        return _saved_tensors_hooks(False) is None and _functorch_level() is None

    def can_wait(self, parameter: Tensor) -> bool:
        """Whether a parameter can wait: it is trained, and known to be used by nothing but what waits.

        A use of one that is not known yet is noted, if it is of a kind that could.
        """
        known = self.parameters.deferrable.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1] and parameter.requires_grad
        self._note(parameter)
        return False

    def _note(self, parameter: Any) -> None:
        """A use of a parameter not known yet, that could wait if all its uses can."""
        if (
            type(parameter) in PLAIN
            and parameter.requires_grad
            and parameter.is_leaf
            and parameter.dtype in _DTYPES
            and parameter.layout is torch.strided
        ):
            self.candidates[id(parameter)] = parameter
            self._uses[id(parameter)] += 1

    def cut(self, parameters: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """An operation on nothing but parameters, all of which waits: its output, without the graph behind it."""
        subgraph = DeferredSubgraph(self.deferred, parameters, get_gradient_edge(output))
        self.deferred.subgraphs.append(subgraph)
        joined: Tensor = _CutFunction.apply(_ANCHOR, (output.detach(),), subgraph)  # type: ignore[no-untyped-call]
        return joined

    def _cast_once(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        key = (id(parameter), dtype)
        found = self.casts.get(key)
        if found is None:
            found = self.casts[key] = _cast(parameter.detach(), dtype)
        return found

    def learn(self, outputs: Sequence[Tensor]) -> None:
        """After a stage's first forward: which parameters can wait, as a walk over the graph shows."""
        in_graph = uses_in_graph(outputs)
        for key, parameter in self.candidates.items():
            if in_graph[key]:
                # Of several microbatches in flight one may take another path: one use that cannot wait decides.
                known = self.parameters.deferrable.get(key)
                refuted = known is not None and known[0]() is parameter and not known[1]
                self.parameters.remember(parameter, in_graph[key] <= self._uses[key] and not refuted)
        self.candidates.clear()


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast casts an operand: floating point, but never double."""
    return x if x.dtype in (dtype, torch.float64) or not x.is_floating_point() else x.to(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# The products: how each is called, and how it is computed on operands without history.


class _Operands(NamedTuple):
    """The operands of a product in the call that was made."""

    x: Any
    weight: Any
    bias: Any = None
    options: Any = None


class _Product(NamedTuple):
    """One of torch's functions that multiply by a parameter."""

    read: Callable[[tuple[Any, ...], dict[str, Any]], _Operands | None]  # None: not a call to take apart
    compute: Callable[[Any, Tensor, Tensor, Tensor | None, Any], tuple[Tensor, Tensor, Any]]
    formula: Formula
    # `compute` returns the output, and the input and the options as the formula needs them


def _arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """The call's arguments by position, missing ones None; None where the call has others than those named."""
    found = [*args, *[None] * (len(names) - len(args))]
    for name, value in kwargs.items():
        if name not in names:
            return None
        found[names.index(name)] = value
    return found if len(found) == len(names) else None


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


def _read_bmm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Operands | None:
    return None if kwargs or len(args) != 2 else _Operands(*args)


def _bmm(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, _: Any) -> tuple[Tensor, Tensor, Any]:
    return torch.bmm(x, weight), x, None


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


PRODUCTS: dict[Any, _Product] = {
    F.linear: _Product(_read_linear, _linear, linear_gradients),
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm),
        _Product(_read_matmul, _matmul, matmul_gradients),
    ),
    torch.addmm: _Product(_read_addmm, _addmm, matmul_gradients),
    torch.bmm: _Product(_read_bmm, _bmm, bmm_gradients),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _Product(_read_convolution, _convolution, convolution_gradients)),
}
