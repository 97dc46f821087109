"""The weight gradients of a split backward, from the recorded forward to `W`.

Zero-bubble schedules split the backward of a stage into `I`, for its inputs, and `W`, for its weights: the inputs'
gradients are sent on at once, and the weights' gradients fill the bubbles. The halves are only worth it if together
they cost what the whole costs, and only right if nothing can tell the difference. torch's own split walks the graph in
Python for each microbatch, writes `.grad` past every hook (so DDP never reduces), loses parameters that the stage's
input does not reach and recomputes checkpoints once per parameter group.

Here the split is made in the forward, where it is cheap::


    forward, recorded     I                                   W
    y = linear(x, w)  ->  autograd runs as ever; the node  ->  the product for w, from the kept x and the
                          of y gives the gradient of x,        kept gradient; then autograd's own accumulation,
                          and the one that arrives is kept     so every hook fires, once per microbatch

`DeferringMode` (`deferring_mode`) fills a `DeferredWeights` during the forward; the operations are in `products`.
Backward may run on threads of autograd's own (it does on accelerators), so nothing here is thread-local.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import RunError
from penstock.runtime.backward.products import Formula, Gradients

# Weight gradients that wait together for one pass of accumulation: few passes for small weights, and never many bytes
# of gradients beside the accumulated ones.
BYTES_PER_PASS = 2**20

_ENGINE = torch.autograd.Variable._execution_engine


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
    """An operation of which only parameters want a gradient: autograd's own graph of it, waiting for its gradient."""

    __slots__ = ("deferred", "edge", "parameters")

    def __init__(self, deferred: DeferredWeights, parameters: tuple[Tensor, ...], edge: GradientEdge) -> None:
        self.deferred = deferred
        self.edge: GradientEdge | None = edge
        self.parameters = parameters


class _DetachedOutput(torch.autograd.Function):
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


ANCHOR = torch.zeros((), requires_grad=True, device="cpu")


@dataclass(eq=False)
class DeferredWeights:
    """The weight gradients of one microbatch of one stage, from its recorded forward to its `W`."""

    products: list[DeferredProduct] = field(default_factory=list)  # both filled by `DeferringMode`, in the forward
    subgraphs: list[DeferredSubgraph] = field(default_factory=list)
    # Each with the version of its gradient.
    _arrived: list[tuple[DeferredProduct, Tensor, int]] = field(default_factory=list)
    _arrived_at_subgraphs: list[tuple[DeferredSubgraph, Tensor, int]] = field(default_factory=list)
    _status: str = "recorded"

    def detach_output(self, parameters: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the output of an operation of which only parameters want a gradient; all of its backward waits for
        `W`.
        """
        subgraph = DeferredSubgraph(self, parameters, get_gradient_edge(output))
        self.subgraphs.append(subgraph)
        joined: Tensor = _DetachedOutput.apply(ANCHOR, (output.detach(),), subgraph)  # type: ignore[no-untyped-call]
        return joined

    # --- I ---

    def begin_input(self) -> None:
        if self._status != "recorded":
            raise RunError(f"I needs a recorded forward and runs once; this microbatch is {self._status}")
        self._status = "in I"

    def arrived(self, product: DeferredProduct, _: Any, gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradient of what a product gave.

        Its node in autograd's graph calls this when it has run, with what it was given: hooks ahead of a node may
        change that, also those that were registered later than this one.
        """
        gradient = gradients[0]
        if gradient is not None:
            if self._status != "in I":
                raise self._outside()
            self._arrived.append((product, gradient, gradient._version))

    def arrived_at_subgraph(self, subgraph: DeferredSubgraph, gradient: Tensor) -> None:
        """Note the same of an operation that waits as a whole."""
        if self._status != "in I":
            raise self._outside()
        self._arrived_at_subgraphs.append((subgraph, gradient, gradient._version))

    def _outside(self) -> RunError:
        return RunError(f"a gradient reached a split operation outside of I, while {self._status}")

    # --- W ---

    @property
    def pending(self) -> int:
        """How many operations wait for `run`."""
        return len(self._arrived) + len(self._arrived_at_subgraphs)

    def run(self) -> None:
        """Run W: compute what waits and accumulate it, in the order in which autograd would have; keep nothing."""
        if self._status != "in I":
            raise RunError(f"W runs once and after I; this microbatch is {self._status}")
        self._status = "done"
        waiting, subgraphs = self._arrived[::-1], self._arrived_at_subgraphs
        self._arrived, self._arrived_at_subgraphs = [], []
        if any(gradient._version != version for _, gradient, version in (*waiting, *subgraphs)):
            raise RunError(
                "a gradient that was kept for W has been written to in place: by a backward or a hook that writes to "
                "the gradient that it is given (return a new one), or because it is the memory of another .grad (make "
                "every tensor that is trained an nn.Parameter of its stage)"
            )
        sums = _Sums()
        while waiting:
            product, gradient, _ = waiting.pop()
            of_weight, of_bias = _weight_gradients(product, gradient)
            sums.add(product.weight, of_weight)
            if product.bias is not None and of_bias is not None:
                sums.add(product.bias, of_bias)
            product.x = None
            del gradient, of_weight, of_bias
            if sums.bytes > BYTES_PER_PASS:
                later = [*(each.parameters for each, _, _ in waiting), *(each.parameters for each, _, _ in subgraphs)]
                sums.accumulate(still_due={id(parameter) for parameters in later for parameter in parameters})
        for subgraph, gradient, _ in subgraphs:
            sums.join(subgraph, gradient)
        sums.accumulate()
        for product in self.products:
            product.x = None
        for subgraph in self.subgraphs:
            subgraph.edge = None
        self.products.clear()
        self.subgraphs.clear()


def _weight_gradients(product: DeferredProduct, gradient: Tensor) -> Gradients:
    """Compute the gradients of the weight and the bias, from the input that was kept and the gradient that arrived."""
    x = product.x
    assert x is not None, "a product is evaluated once"
    if x._version != product.version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: the "
            f"input of shape {list(x.shape)} to a parameter of shape {list(product.weight.shape)} is at version "
            f"{x._version}; expected version {product.version} instead"
        )
    return product.formula(x, gradient, product.weight, product.bias, product.options)


class _Sums:
    """Gradients on their way to their parameters: one sum per parameter, so that its hooks fire once."""

    def __init__(self) -> None:
        self.bytes = 0
        self._roots: list[Tensor | GradientEdge] = []
        self._gradients: list[Tensor] = []
        self._positions: dict[int, int] = {}

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        position = self._positions.get(id(parameter))
        if position is not None:
            self._gradients[position] = self._gradients[position] + gradient
            return
        self._positions[id(parameter)] = len(self._roots)
        self._roots.append(parameter)
        self._gradients.append(gradient)
        self.bytes += gradient.nbytes

    def join(self, subgraph: DeferredSubgraph, gradient: Tensor) -> None:
        """Leave what waits as a whole to autograd."""
        assert subgraph.edge is not None, "a subgraph is joined once"
        self._roots.append(subgraph.edge)
        self._gradients.append(gradient)

    def accumulate(self, still_due: Set[int] = frozenset()) -> None:
        """Hand the sums to autograd's own accumulation, but for the parameters to which more is to come."""
        roots, gradients = self._roots, self._gradients
        self._roots, self._gradients, self._positions, self.bytes = [], [], {}, 0
        if still_due:
            for root, gradient in zip(roots, gradients, strict=True):
                if isinstance(root, Tensor) and id(root) in still_due:
                    self.add(root, gradient)
            ready = [index for index, root in enumerate(roots) if id(root) not in still_due]
            roots, gradients = [roots[index] for index in ready], [gradients[index] for index in ready]
        if roots:
            # torch.autograd.backward checks each root in Python first, which costs more than a small product.
            _ENGINE.run_backward(
                tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
