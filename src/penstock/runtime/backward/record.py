"""What a microbatch holds of a stage between its forward and its backward: edges of the graph, and no outputs.

The gradients of what arrived go back as they come out of the graph. Autograd would accumulate them into the leaves,
and lays them anew then where their strides are not the leaf's: a sum over a transposed gradient is taken in another
order than over a contiguous one, so the stage before would compute other last bits than in a plain loop. A hook of
each leaf therefore keeps what would not be taken over as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from penstock.model.part import OUTPUT
from penstock.runtime.backward.split import DeferredWeights
from penstock.runtime.state.memory import LINE, is_dense

__all__ = ["GraphRecord", "tensors_with_gradient"]

_WRITTEN_IN_PYTHON: Any = torch._C._FunctionBase  # nodes of autograd.Function: their object does not keep the graph


class GraphRecord:
    """What a microbatch holds between its forward and its backward."""

    __slots__ = (
        "_hooks",
        "_strange",
        "again",
        "deferred",
        "extra",
        "leaves",
        "loss",
        "roots",
        "total",
        "wants",
        "whole",
    )

    def __init__(self, arrived: Mapping[int, Any]) -> None:
        # by producing stage: the arrived tensors that want a gradient
        self.leaves = leaves = {stage: tensors_with_gradient(payload) for stage, payload in arrived.items()}
        self._strange: dict[int, Tensor] = {}  # by id of the leaf: gradients that do not lie as autograd would lay them
        self._hooks = [_watch(leaf, self._strange) for group in leaves.values() for leaf in group]
        self.roots: dict[int, list[GradientEdge]] = {}  # by consuming stage
        self.loss: GradientEdge | None = None
        self.extra: list[GradientEdge] = []
        self.deferred: DeferredWeights | None = None
        self.again: Callable[[], None] | None = None  # recompute: runs the forward that was thrown away
        self.whole = False  # all microbatches in one
        # of a stage that takes its batch in one piece: by producer and microbatch, which tensors want a gradient
        self.wants: dict[int, list[list[bool]]] = {}
        self.total: Tensor | None = None  # and its loss

    def end_forward(
        self, emitted: Mapping[int, Any], loss: Tensor | None, extra: Sequence[tuple[str, Tensor]], returns: bool
    ) -> None:
        """Keep the edges at which the backward begins. `returns`: the output's gradient comes from the user's graph."""
        ends: list[Tensor] = []
        for target, payload in emitted.items():
            if target != OUTPUT or returns:
                found = tensors_with_gradient(payload)
                self.roots[target] = [_edge_of(tensor) for tensor in found]
                ends += found
        if loss is not None and loss.requires_grad:
            self.loss = _edge_of(loss)
        if extra:
            self.extra = [_edge_of(value) for _, value in extra if value.requires_grad]
        if self.deferred is not None:
            ends += [value for value in (loss, *(value for _, value in extra)) if value is not None]
            self.deferred.learn(ends)

    def forget_graph(self) -> None:
        """The forward will run again: drop what it has recorded."""
        self.roots, self.loss, self.extra, self.deferred = {}, None, [], None

    def begin_backward(self) -> None:
        """Hooks of the stage's own, which may change a gradient, go first."""
        self._strange.clear()  # the forward may have taken gradients itself
        for hooks in self._hooks:
            if len(hooks) > 1:
                hooks[_OURS] = hooks.pop(_OURS)  # torch takes them as a plain dict has them

    def take_gradients(self) -> dict[int, list[Tensor | None]]:
        """What goes back to each producing stage, by its leaves; None where there is none."""
        strange, back = self._strange, dict[int, list[Tensor | None]]()
        for stage, leaves in self.leaves.items():
            back[stage] = [strange.pop(id(leaf), leaf.grad) if strange else leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
        return back


_OURS = -1  # among the hooks of a tensor, which are numbered from 0 on


class _Watch:
    """The hook of one leaf."""

    __slots__ = ("place", "strange", "stride")
    __torch_unserializable__ = True  # a stage may save what it is given, and is not warned that hooks stay behind

    def __init__(self, place: int, stride: tuple[int, ...] | None, strange: dict[int, Tensor]) -> None:
        self.place, self.stride, self.strange = place, stride, strange

    def __call__(self, gradient: Tensor) -> None:
        if gradient.layout is torch.strided and (gradient.stride() != self.stride or gradient.data_ptr() % LINE):
            self.strange[self.place] = gradient


def _watch(leaf: Tensor, strange: dict[int, Tensor]) -> OrderedDict[int, _Watch]:
    """As `register_hook` does, which takes three times as long."""
    hooks = OrderedDict({_OURS: _Watch(id(leaf), leaf.stride() if is_dense(leaf) else None, strange)})
    leaf._backward_hooks = hooks  # type: ignore[assignment]
    return hooks


def tensors_with_gradient(value: Any) -> list[Tensor]:
    """The tensors of a payload that want a gradient, in the order both ends agree on."""
    if type(value) is Tensor:
        return [value] if value.requires_grad else []
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _edge_of(tensor: Tensor) -> GradientEdge:
    """`get_gradient_edge` without its questions where the answer is plain: an ordinary node of autograd's own."""
    node = tensor.grad_fn
    if node is None or isinstance(node, _WRITTEN_IN_PYTHON):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)
