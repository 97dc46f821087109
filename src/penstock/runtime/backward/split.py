"""The backward of a stage, whole (`B`) or in two halves: `I`, for the stage's inputs, and `W`, for its weights.

Zero-bubble schedules send the inputs' gradients on at once and fill the bubbles with the weights' gradients. The
halves are only worth it if together they cost what the whole costs, and only right if nothing can tell the
difference. torch's own split walks the graph in Python for each microbatch, writes `.grad` past every hook (so DDP
never reduces), loses parameters that the stage's input does not reach and recomputes checkpoints once per parameter
group.

Here the split is made in the forward, where it is cheap::

    forward, recorded     I                                   W
    y = linear(x, w)  ->  autograd runs as ever; the node  ->  the product for w, from the kept x and the
                          of y gives the gradient of x,        kept gradient; then autograd's own accumulation,
                          and the one that arrives is kept     so every hook fires, once per microbatch

What cannot be taken apart stays in `I`, exact. A parameter must not be halfway: with one gradient in `I` and one in
`W` its hooks would fire twice. So a parameter is deferred only once a first microbatch has shown, in the graph itself,
that every use of it can be; until then its gradients come in `I`. `StageParameters` remembers that for a stage.

Backward may run on threads of autograd's own (it does on CUDA), so nothing here is thread-local but the mode, which is
on only during the forward.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from penstock.errors import RunError
from penstock.runtime.backward.graph_leaves import uses_in_graph
from penstock.runtime.backward.products import PLAIN, RULES, Formula, Gradients, cast

# Weight gradients that wait together for one pass of accumulation: few passes for small weights, and never many bytes
# of gradients beside the accumulated ones.
BYTES_PER_PASS = 2**20

_ENGINE = torch.autograd.Variable._execution_engine
_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class StageParameters:
    """Which parameters of a stage can wait for `W`: those that no operation uses but those that wait. One per stage."""

    def __init__(self) -> None:
        self._deferrable: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        self.differentiates = False  # the stage's forward takes gradients itself: nothing of it is deferred

    @property
    def known(self) -> bool:
        """Whether a first microbatch has been looked at."""
        return bool(self._deferrable)

    def status(self, parameter: Tensor) -> bool | None:
        """True: every use of it can wait. False: some use cannot. None: not known yet."""
        known = self._deferrable.get(id(parameter))
        return known[1] if known is not None and known[0]() is parameter else None

    def learn(self, candidates: dict[int, Tensor], uses: Counter[int], outputs: Sequence[Tensor]) -> None:
        """Compare the uses that could wait with all uses in the graph. Walks it once, at a stage's first microbatch."""
        in_graph = uses_in_graph(outputs)
        for key, parameter in candidates.items():
            if in_graph[key]:
                # Of several microbatches in flight one may take another path: one use that cannot wait decides.
                every = in_graph[key] <= uses[key] and self.status(parameter) is not False
                self._deferrable[key] = (weakref.ref(parameter, partial(_forget, weakref.ref(self), key)), every)


def _forget(parameters: weakref.ref[StageParameters], key: int, _: weakref.ref[Tensor]) -> None:
    if (found := parameters()) is not None:
        found._deferrable.pop(key, None)


class DeferredProduct:
    """One product whose weight gradient is taken later. As a pre-hook of its node, it receives the gradient."""

    __slots__ = ("bias", "deferred", "formula", "options", "version", "weight", "x")

    def __init__(
        self,
        deferred: DeferredWeights,
        formula: Formula,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: Any = None,
    ) -> None:
        self.deferred = deferred
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
            self.deferred.arrived(self, gradient)

    def gradients(self, gradient: Tensor) -> Gradients:
        """Of the weight and the bias, from the input that was kept and the gradient that arrived."""
        x = self.x
        assert x is not None, "a use is evaluated once"
        if x._version != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: the "
                f"input of shape {list(x.shape)} to a parameter of shape {list(self.weight.shape)} is at version "
                f"{x._version}; expected version {self.version} instead"
            )
        return self.formula(x, gradient, self.weight, self.bias, self.options)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def free(self) -> None:
        self.x = None


class DeferredSubgraph:
    """An operation on nothing but parameters: autograd's own graph of it, waiting for its gradient."""

    __slots__ = ("deferred", "edge", "parameters")

    def __init__(self, deferred: DeferredWeights, parameters: tuple[Tensor, ...], edge: GradientEdge) -> None:
        self.deferred = deferred
        self.edge: GradientEdge | None = edge
        self.parameters = parameters

    def free(self) -> None:
        self.edge = None


class _CutFunction(torch.autograd.Function):
    """The identity whose gradient stops here and waits. It hangs on an anchor, so that its backward runs at all."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, output: tuple[Tensor], cut: DeferredSubgraph) -> Tensor:
        ctx.cut = cut
        ctx.set_materialize_grads(False)
        return output[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        if gradients[0] is not None:
            ctx.cut.deferred.arrived(ctx.cut, gradients[0])
        return None, None, None


_ANCHOR = torch.zeros((), requires_grad=True)

DeferredOperation = DeferredProduct | DeferredSubgraph


class DeferredWeights:
    """The weight gradients of one microbatch of one stage, from its recorded forward to its `W`."""

    def __init__(self, parameters: StageParameters) -> None:
        self.parameters = parameters
        self.uses: list[DeferredOperation] = []
        self._arrived: list[tuple[DeferredOperation, Tensor]] = []
        self._versions: list[int] = []  # of these gradients
        self._candidates: dict[int, Tensor] = {}
        self._seen: Counter[int] = Counter()
        self._casts: dict[tuple[int, torch.dtype], Tensor] = {}
        self._phase = "new"

    # --- the forward ---

    def recording(self) -> AbstractContextManager[object]:
        """The context for this microbatch's forward; then come `begin_input`, the backward, and `run`."""
        if self._phase != "new":
            raise RunError(f"a forward is recorded once; this one is {self._phase}; take a new DeferredWeights")
        self._phase = "recorded"
        return nullcontext() if self.parameters.differentiates else self.mode()

    def mode(self) -> AbstractContextManager[object]:
        return _Recording(self)

    def takes(self, parameter: Any) -> bool:
        """Whether the gradient of `parameter` can wait. One that is not known yet is looked at in `learn`."""
        status = self.parameters.status(parameter)
        if status is None:
            self.note(parameter)
        return status is True and bool(parameter.requires_grad)

    def note(self, parameter: Any) -> bool:
        """A use of a parameter not known yet, that could wait if all its uses can; whether it is such a one."""
        if not (
            type(parameter) in PLAIN
            and parameter.requires_grad
            and parameter.is_leaf
            and parameter.dtype in _DTYPES
            and parameter.layout is torch.strided
        ):
            return False
        self._candidates[id(parameter)] = parameter
        self._seen[id(parameter)] += 1
        return True

    def keep(
        self, output: Tensor, formula: Formula, x: Tensor, weight: Tensor, bias: Tensor | None, options: Any
    ) -> Tensor:
        """A product whose weight gradient waits; `bias` where that of the bias does too."""
        use = DeferredProduct(self, formula, x, weight, bias, options)
        output.grad_fn.register_prehook(use)  # type: ignore[union-attr]
        self.uses.append(use)
        return output

    def cut(self, parameters: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """An operation on nothing but parameters, all of which waits: its output, without the graph behind it."""
        cut = DeferredSubgraph(self, parameters, get_gradient_edge(output))
        self.uses.append(cut)
        joined: Tensor = _CutFunction.apply(_ANCHOR, (output.detach(),), cut)  # type: ignore[no-untyped-call]
        return joined

    def cast(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """The parameter as autocast would give it, cast once per microbatch."""
        key = (id(parameter), dtype)
        found = self._casts.get(key)
        if found is None:
            found = self._casts[key] = cast(parameter.detach(), dtype)
        return found

    def learn(self, outputs: Sequence[Tensor]) -> None:
        """After the forward: find out which parameters can be deferred."""
        if self._candidates:
            self.parameters.learn(self._candidates, self._seen, outputs)
            self._candidates.clear()
        self._casts.clear()

    # --- I ---

    def begin_input(self) -> None:
        if self._phase != "recorded":
            raise RunError(f"I needs a recorded forward and runs once; this microbatch is {self._phase}")
        self._phase = "in I"

    def arrived(self, use: DeferredOperation, gradient: Tensor) -> None:
        if self._phase != "in I":
            raise RunError(f"a gradient reached a split operation outside of I, while {self._phase}")
        self._arrived.append((use, gradient))
        self._versions.append(gradient._version)

    # --- W ---

    @property
    def pending(self) -> int:
        """How many operations wait for `run`."""
        return len(self._arrived)

    def run(self) -> None:
        """W: compute what waits and accumulate it, in the order in which autograd would have; keep nothing."""
        if self._phase != "in I":
            raise RunError(f"W runs once and after I; this microbatch is {self._phase}")
        self._phase = "done"
        arrived, self._arrived = self._arrived, []
        if any(gradient._version != version for (_, gradient), version in zip(arrived, self._versions, strict=True)):
            raise RunError(
                "a gradient that was kept for W has been written to in place: by a backward or a hook that writes to "
                "the gradient that it is given (return a new one), or because it is the memory of another .grad (make "
                "every tensor that is trained an nn.Parameter of its stage)"
            )
        self._versions = []
        cuts = [(use, gradient) for use, gradient in arrived if isinstance(use, DeferredSubgraph)]
        waiting = [(use, gradient) for use, gradient in reversed(arrived) if isinstance(use, DeferredProduct)]
        del arrived
        sums = _Sums()
        while waiting:
            use, gradient = waiting.pop()
            of_weight, of_bias = use.gradients(gradient)
            sums.add(use.weight, of_weight)
            if use.bias is not None and of_bias is not None:
                sums.add(use.bias, of_bias)
            use.free()
            del gradient, of_weight, of_bias
            if sums.bytes > BYTES_PER_PASS:
                later: list[DeferredOperation] = [
                    *(use for use, _ in waiting),
                    *(cut for cut, _ in cuts),
                ]
                sums.accumulate(still_due={id(p) for each in later for p in each.parameters})
        for cut, gradient in cuts:
            sums.join(cut, gradient)
        sums.accumulate()
        for done in self.uses:
            done.free()
        self.uses.clear()


class _Sums:
    """Gradients on their way to their parameters: one sum a parameter, so that its hooks fire once."""

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

    def join(self, cut: DeferredSubgraph, gradient: Tensor) -> None:
        assert cut.edge is not None, "a cut is joined once"
        self._roots.append(cut.edge)
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


class _Recording(TorchFunctionMode):
    """On during the forward of one microbatch, in the thread that runs it."""

    def __init__(self, deferred: DeferredWeights) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        # The compiler inlines a mode into what it compiles; there, this one shall be nothing at all.
        rule = None if torch.compiler.is_compiling() else RULES.get(func)
        if rule is not None:
            output = rule(self._deferred, func, args, kwargs or {})
            if output is not None:
                return output
        return func(*args, **kwargs) if kwargs else func(*args)
