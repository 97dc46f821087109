"""What a microbatch holds of a stage between its forward and its backward: edges of the graph, and no outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from penstock.runtime.backward import DeferredWeights

__all__ = ["Record", "edge_of", "tensors_with_gradient"]

_WRITTEN_IN_PYTHON: Any = torch._C._FunctionBase  # nodes of autograd.Function: their object does not keep the graph


class Record:
    """What a microbatch holds between its forward and its backward."""

    __slots__ = ("again", "deferred", "extra", "leaves", "loss", "roots", "total", "wants", "whole")

    def __init__(self, leaves: dict[int, list[Tensor]]) -> None:
        self.leaves = leaves  # by producing stage: the arrived tensors that want a gradient
        self.roots: dict[int, list[GradientEdge]] = {}  # by consuming stage
        self.loss: GradientEdge | None = None
        self.extra: list[GradientEdge] = []
        self.deferred: DeferredWeights | None = None
        self.again: Callable[[], None] | None = None  # recompute: runs the forward that was thrown away
        self.whole = False  # all microbatches in one
        # of a stage that takes its batch in one piece: by producer and microbatch, which tensors want a gradient
        self.wants: dict[int, list[list[bool]]] = {}
        self.total: Tensor | None = None  # and its loss


def tensors_with_gradient(value: Any) -> list[Tensor]:
    """The tensors of a payload that want a gradient, in the order both ends agree on."""
    if type(value) is Tensor:
        return [value] if value.requires_grad else []
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


def edge_of(tensor: Tensor) -> GradientEdge:
    """`get_gradient_edge` without its questions where the answer is plain: an ordinary node of autograd's own."""
    node = tensor.grad_fn
    if node is None or isinstance(node, _WRITTEN_IN_PYTHON):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)
