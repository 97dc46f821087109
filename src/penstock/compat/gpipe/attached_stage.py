"""A pipeline as one node of the user's own graph.

The model is called and gives its output; later, somewhere in the user's `loss.backward()`, autograd comes to the node
with the output's gradient. So a step is in two halves, each a program of its own: the forward part of a schedule runs
in the call, the backward part in the node. What stages hold between them is taken off them and kept with the node, so
that any number of calls can be open at a time.

In the node's backward the stages do not write to `.grad`. They ask autograd for the gradients of their parameters and
of the model's inputs, the sums over microbatches are what the node returns, and the user's own backward takes it from
there. Hooks of parameters therefore fire once, `torch.autograd.grad` works, and so does whatever waits for gradients.

The backward runs the last microbatch first. It is the one whose activations are kept with checkpoint="except_last",
and autograd itself would go that way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge

from penstock.errors import RunError
from penstock.model.part import StagePart
from penstock.runtime.backward.graph_leaves import leaves_in_graph
from penstock.runtime.backward.saved_graph import RunBackward, SavedGraph
from penstock.runtime.engine.stage import Stage
from penstock.runtime.state.randomness import StageRandomness

_ENGINE = torch.autograd.Variable._execution_engine


class AttachedStage(Stage):
    """A stage whose gradients go back to the user's graph."""

    attached = True

    def __init__(
        self, part: StagePart, randomness: StageRandomness, *, is_last: bool, loss: nn.Module | None = None
    ) -> None:
        super().__init__(part, randomness, is_last=is_last, loss=loss)
        self.parameters: list[Tensor] = []  # what the call in hand wants gradients of
        # By microbatch: the model's inputs that want a gradient.
        self.pieces: list[list[Tensor]] = []
        self.found: list[Tensor | None] = []  # the gradients of `parameters`, summed
        self.keep_graph = False
        self.foreign: dict[int, Tensor] = {}  # leaves that are no parameters of the stage, and want a gradient

    # -- forward

    def _inspect_graph(self, graph: SavedGraph, kind: str) -> None:
        if kind == "recomputing":
            return
        # a walk costs less than a hundredth of the forward
        known = {id(leaf) for leaves in graph.leaves.values() for leaf in leaves}
        known |= {id(leaf) for leaves in (self.parameters, *self.pieces) for leaf in leaves}
        ends = [edge.node for edges in graph.roots.values() for edge in edges]
        for leaf in leaves_in_graph(ends, self.parameters):
            if id(leaf) not in known:
                self.foreign[id(leaf)] = leaf

    # -- backward

    def _runs_backward(self) -> RunBackward:
        return self._ask

    def _ask(self, graph: SavedGraph, roots: list[GradientEdge], seeds: list[Tensor]) -> None:
        """Ask autograd for gradients, and leave `.grad` of parameters alone."""
        arrived = [leaf for leaves in graph.leaves.values() for leaf in leaves]
        pieces = self.pieces if graph.gathered else self.pieces[graph.microbatch : graph.microbatch + 1]
        entered = [leaf for leaves in pieces for leaf in leaves]
        inputs = (*arrived, *entered, *self.parameters)
        if not inputs:
            return
        gradients: Sequence[Tensor | None] = _ENGINE.run_backward(
            tuple(roots), tuple(seeds), self.keep_graph, False, inputs, allow_unreachable=True, accumulate_grad=False
        )
        own = len(arrived) + len(entered)
        for leaf, gradient in zip(inputs[:own], gradients[:own], strict=True):
            leaf.grad = gradient
        for place, gradient in enumerate(gradients[own:]):
            if gradient is not None:
                self._add(place, gradient)

    def _add(self, place: int, gradient: Tensor) -> None:
        """Add a gradient. The first may be in use elsewhere and is left alone; their sum is ours to add to."""
        total = self.found[place]
        if total is None:
            self.found[place] = gradient
        elif total.layout is not gradient.layout and gradient.layout is torch.strided:
            self.found[place] = gradient + total
        elif self._summed[place] and total.layout is torch.strided:
            total.add_(gradient)
        else:
            self.found[place] = total + gradient
            self._summed[place] = True

    def begin(self, parameters: list[Tensor], pieces: list[list[Tensor]], keep_graph: bool = False) -> None:
        """Begin one half of a step, forward or backward."""
        self.parameters, self.pieces, self.keep_graph = parameters, pieces, keep_graph
        self.foreign = {}
        self.found = [None] * len(parameters)
        self._summed = [False] * len(parameters)

    def end(self) -> None:
        """End the step: nothing of it stays here."""
        self.parameters, self.pieces, self.found, self.saved, self.foreign = [], [], [], {}, {}

    def clear(self) -> None:
        super().clear()
        self.end()


@contextmanager
def muted(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Mute hooks of parameters: they wait for the whole gradient, which the user's own backward brings them.

    Autograd calls a tensor's hooks also for a gradient that is only asked for; it reads them off this dictionary.
    """
    hooks = [(table, dict(table)) for parameter in parameters if (table := parameter._backward_hooks)]
    for table, _ in hooks:
        table.clear()
    try:
        yield
    finally:
        for table, before in hooks:
            table.update(before)


WeightVersions = list[tuple[Tensor, int]]  # parameters, and the versions that they had


def check_weights(now: Iterable[Tensor], then: WeightVersions) -> None:
    """Check that a forward does not run again with other weights than it first had."""
    found = list(now)
    changed = sum(tensor._version != version for tensor, version in then)
    replaced = len(found) != len(then) or any(have is not was for have, (was, _) in zip(found, then, strict=True))
    if changed or replaced:
        what = "were replaced" if replaced else "were changed in place"
        raise RunError(
            f"parameters {what} between the forward and its backward, in which checkpointed microbatches run forward "
            f"again: call backward() before optimizer.step(), or use checkpoint='never'"
        )


class Stages(torch.autograd.Function):
    """All stages of a call, from what wants a gradient to a token; behind it, `Outputs` gives the outputs.

    Two nodes, because autograd goes back through a node on the thread of the gradients' device. There nothing may wait
    for the stages, whose own backwards need that thread. So `Outputs` only takes the gradients, and the token, which
    is on the CPU, brings the thread that has called backward() here.
    """

    @staticmethod
    def forward(ctx: Any, call: Any, *sources: Tensor) -> Tensor:
        ctx.call = call
        return torch.zeros((), device="cpu")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        with ctx.call.calls.turn:
            return (None, *ctx.call.backward())


class Outputs(torch.autograd.Function):
    """The outputs of a call; its backward only takes their gradients."""

    @staticmethod
    def forward(ctx: Any, call: Any, token: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs, call.outputs = tuple(call.outputs), []
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor]:
        ctx.call.arrived = gradients
        return None, torch.zeros((), device="cpu")
