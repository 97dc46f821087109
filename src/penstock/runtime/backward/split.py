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
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from penstock.errors import RunError
from penstock.runtime.backward.parameter_uses import Cut, Use
from penstock.runtime.backward.products import HANDLERS, PLAIN, cast

# Weight gradients that wait together for one pass of accumulation: few passes for small weights, and never many bytes
# of gradients beside the accumulated ones.
BYTES_PER_PASS = 2**20

_LEAF: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_ENGINE = torch.autograd.Variable._execution_engine
_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class StageParameters:
    """Which parameters of a stage can wait for `W`: those that no operation uses but those that wait. One per stage."""

    def __init__(self) -> None:
        self._deferrable: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        self._differentiates = False

    def differentiates(self) -> None:
        """The stage's forward takes gradients itself: from now on, nothing of it is deferred."""
        self._differentiates = True

    @property
    def known(self) -> bool:
        """Whether a first microbatch has been looked at."""
        return bool(self._deferrable)

    @property
    def splits(self) -> bool:
        return not self._differentiates

    def status(self, parameter: Tensor) -> bool | None:
        """True: every use of it can wait. False: some use cannot. None: not known yet."""
        known = self._deferrable.get(id(parameter))
        return known[1] if known is not None and known[0]() is parameter else None

    def learn(self, candidates: dict[int, Tensor], uses: Counter[int], outputs: Sequence[Tensor]) -> None:
        """Compare the uses that could wait with all uses in the graph. Walks it once, at a stage's first microbatch."""
        in_graph = _uses_in_graph(outputs)
        for key, parameter in candidates.items():
            if in_graph[key]:
                # Of several microbatches in flight one may take another path: one use that cannot wait decides.
                every = in_graph[key] <= uses[key] and self.status(parameter) is not False
                self._deferrable[key] = (weakref.ref(parameter, self._forgetter(key)), every)

    def _forgetter(self, key: int) -> Callable[[weakref.ref[Tensor]], None]:
        table = weakref.ref(self)

        def forget(_: weakref.ref[Tensor]) -> None:
            if (self := table()) is not None:
                self._deferrable.pop(key, None)

        return forget


def _uses_in_graph(outputs: Sequence[Tensor]) -> Counter[int]:
    """How often each leaf is used in the graph behind `outputs`, by the leaf's id."""
    uses = Counter(id(output) for output in outputs if output.grad_fn is None)
    nodes: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if node is None:
                continue
            if isinstance(node, _LEAF):
                uses[id(node.variable)] += 1
            elif node not in seen:
                seen.add(node)
                nodes.append(node)
    return uses


def leaves_in_graph(nodes: Iterable[Any], known: Iterable[Tensor] = ()) -> Iterator[Tensor]:
    """All leaves in the graph behind some nodes, but for what is behind tensors that are known."""
    waiting = list(nodes)
    seen = {*waiting, *(tensor.grad_fn for tensor in known)}
    while waiting:
        node = waiting.pop()
        if isinstance(node, _LEAF):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


class DeferredWeights:
    """The weight gradients of one microbatch of one stage, from its recorded forward to its `W`."""

    def __init__(self, parameters: StageParameters) -> None:
        self.parameters = parameters
        self.uses: list[Use | Cut] = []
        self._arrived: list[tuple[Use | Cut, Tensor]] = []
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
        return self.mode() if self.parameters.splits else nullcontext()

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

    def keep(self, output: Tensor, use: Use) -> Tensor:
        output.grad_fn.register_prehook(use)  # type: ignore[union-attr]
        self.uses.append(use)
        return output

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

    def arrived(self, use: Use | Cut, gradient: Tensor) -> None:
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
        cuts = [(use, gradient) for use, gradient in arrived if isinstance(use, Cut)]
        waiting = [(use, gradient) for use, gradient in reversed(arrived) if isinstance(use, Use)]
        del arrived
        sums = _Sums()
        while waiting:
            use, gradient = waiting.pop()
            use.formula(use, gradient, sums.add)
            use.free()
            del gradient
            if sums.bytes > BYTES_PER_PASS:
                later: list[Use | Cut] = [*(use for use, _ in waiting), *(cut for cut, _ in cuts)]
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

    def join(self, cut: Cut, gradient: Tensor) -> None:
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

    def __init__(self, tape: DeferredWeights) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        # The compiler inlines a mode into what it compiles; there, this one shall be nothing at all.
        handler = None if torch.compiler.is_compiling() else HANDLERS.get(func)
        if handler is not None:
            output = handler(self._tape, func, args, kwargs or {})
            if output is not None:
                return output
        return func(*args, **kwargs) if kwargs else func(*args)
