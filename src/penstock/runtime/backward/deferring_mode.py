"""What sees a stage's forward and takes apart the operations whose weight gradients can wait for `W`.

A parameter must not be halfway: with one gradient in `I` and one in `W` its hooks would fire twice. So a parameter is
deferred only once a first microbatch has shown, in the graph itself, that every use of it can be; until then its
gradients come in `I`. `DeferrableParameters` remembers that for a stage.

Where the input of an operation needs no gradient (the first layer of the first stage, an embedding) there is nothing to
do in `I`: the operation is left to autograd as it is, and its output is *detached* from it, to be joined again in `W`.

Everything else passes through untouched, which is always exact: it only means that its weight gradients are taken
together with the inputs'. That holds for operations not in the tables, for parameters reached through a view or a
cast, inside checkpoints (whose recomputation must not happen twice) and inside compiled code.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks as _saved_tensors_hooks
from torch._C._functorch import peek_interpreter_stack as _functorch_level
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from penstock.errors import ModelError
from penstock.runtime.backward.deferred_weights import DeferredProduct, DeferredWeights
from penstock.runtime.backward.graph_leaves import uses_in_graph
from penstock.runtime.backward.products import PLAIN, PRODUCTS, Product

_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class DeferrableParameters:
    """Which parameters of a stage can wait for `W`: those that no operation uses but those that wait. One per stage."""

    def __init__(self) -> None:
        # By id of a parameter: whether every use of it can wait.
        self.deferrable: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        self.has_none = False  # a forward was seen in which nothing could wait
        self.differentiates = False  # the stage's forward takes gradients itself: nothing of it is deferred

    @property
    def known(self) -> bool:
        """Whether a first microbatch has shown its graph."""
        return self.has_none or bool(self.deferrable)

    def remember(self, parameter: Tensor, every_use_waits: bool) -> None:
        """Remember this for as long as the parameter lives."""
        key = id(parameter)
        self.deferrable[key] = (weakref.ref(parameter, partial(_forget, weakref.ref(self), key)), every_use_waits)


def _forget(parameters: weakref.ref[DeferrableParameters], key: int, _: weakref.ref[Tensor]) -> None:
    if (found := parameters()) is not None:
        found.deferrable.pop(key, None)


class DeferringMode(TorchFunctionMode):
    """On during the forward of one microbatch, in the thread that runs it; fills `deferred`."""

    def __init__(self, parameters: DeferrableParameters) -> None:
        super().__init__()
        self.deferred = DeferredWeights()
        self.parameters = parameters
        self.candidates: dict[int, Tensor] = {}  # parameters of which it is not known yet whether they can wait
        self.casts: dict[tuple[int, torch.dtype], Tensor] = {}  # parameters as autocast gives them, cast once
        # How often each candidate was used in a way that could wait.
        self._uses: Counter[int] = Counter()

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

    def _product(self, product: Product, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the output of a product whose weight gradient waits; None where it is to run as it is."""
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
            return self.deferred.detach_output(
                (own,) if waiting_bias is None else (own, waiting_bias), func(*args, **kwargs)
            )
        weight, bias = own.detach(), own_bias if waiting_bias is None else waiting_bias.detach()
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = _cast(x, dtype), self._cast_once(own, dtype)
            bias = bias if waiting_bias is None else self._cast_once(waiting_bias, dtype)
        output, x, options = product.compute(func, x, weight, bias, options)
        waiting = DeferredProduct(product.formula, x, own, waiting_bias, options)
        output.grad_fn.register_hook(partial(self.deferred.arrived, waiting))  # type: ignore[union-attr]
        self.deferred.products.append(waiting)
        return output

    @staticmethod
    def may_split(x: Any) -> bool:
        """Return whether an operation on this input may be taken apart here at all.

        In a checkpoint or an offload, what is saved is not ours to keep. What is detached has no tangent.
        """
        if not torch.is_grad_enabled() or type(x) not in PLAIN or forward_ad._current_level >= 0:
            return False
        return _saved_tensors_hooks(False) is None and _functorch_level() is None

    def can_wait(self, parameter: Tensor) -> bool:
        """Return whether a parameter can wait: it is trained, and known to be used by nothing but what waits.

        A use of one that is not known yet is noted, if it is of a kind that could.
        """
        known = self.parameters.deferrable.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1] and parameter.requires_grad
        self._note(parameter)
        return False

    def _note(self, parameter: Any) -> None:
        """Note a use of a parameter not known yet, that could wait if all its uses can."""
        if (
            type(parameter) in PLAIN
            and parameter.requires_grad
            and parameter.is_leaf
            and parameter.dtype in _DTYPES
            and parameter.layout is torch.strided
        ):
            self.candidates[id(parameter)] = parameter
            self._uses[id(parameter)] += 1

    def _cast_once(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        key = (id(parameter), dtype)
        found = self.casts.get(key)
        if found is None:
            found = self.casts[key] = _cast(parameter.detach(), dtype)
        return found

    def learn(self, outputs: Sequence[Tensor]) -> None:
        """Learn, after a stage's first forward, which parameters can wait, as a walk over the graph shows."""
        in_graph = uses_in_graph(outputs)
        for key, parameter in self.candidates.items():
            if in_graph[key]:
                # Of several microbatches in flight one may take another path: one use that cannot wait decides.
                known = self.parameters.deferrable.get(key)
                refuted = known is not None and known[0]() is parameter and not known[1]
                self.parameters.remember(parameter, in_graph[key] <= self._uses[key] and not refuted)
        self.candidates.clear()


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast an operand as autocast does: floating point, but never double."""
    return x if x.dtype in (dtype, torch.float64) or not x.is_floating_point() else x.to(dtype)


# -- operations that are no products: each has a rule of its own; one that returns None says "run it as it is"


def _embedding(mode: DeferringMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) < 2 or not (mode.may_split(args[0]) and mode.can_wait(args[1])):
        return None
    return mode.deferred.detach_output((args[1],), func(*args, **kwargs))


def _attention(mode: DeferringMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `nn.MultiheadAttention`, which hands itself to the mode as one function; its products are inside.

    The function asks first whether a mode wants it and would be handed back for ever; so the same code runs with that
    question answered by no, with the mode on for what it calls.
    """
    if any(isinstance(value, Tensor) and type(value) not in PLAIN for value in (*args, *kwargs.values())):
        return None  # a subclass of Tensor may want to be asked
    unasked = FunctionType(
        func.__code__, {**func.__globals__, "has_torch_function": lambda _: False}, func.__name__, func.__defaults__
    )
    with mode:
        return unasked(*args, **kwargs)


def _inner_gradient(mode: DeferringMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to take a stage apart that differentiates in its forward: it needs the parameters in its graph."""
    count = len(mode.deferred.products) + len(mode.deferred.subgraphs)
    if count:
        raise ModelError(
            f"a stage's forward calls {func.__qualname__} after {count} of its operations were split into "
            f"input and weight gradients, and in earlier microbatches it did not; choose a schedule without W for it"
        )
    mode.parameters.differentiates = True


Rule: TypeAlias = Callable[[DeferringMode, Any, tuple[Any, ...], dict[str, Any]], Any]

RULES: dict[Any, Rule] = {
    F.embedding: _embedding,
    F.multi_head_attention_forward: _attention,
    **dict.fromkeys((torch.autograd.grad, Tensor.backward), _inner_gradient),
}
