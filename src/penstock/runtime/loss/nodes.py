"""What single nodes of a loss's graph show: what they make of what, and the numbers that they do it with."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

NEGATIVE_LOG_LIKELIHOOD = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
TAKEN = frozenset({"SelectBackward0", "UnbindBackward0"})  # one row, where it is along the first dimension
JOINED = "CatBackward0"  # rows again
MEAN, SUM = 1, 2  # torch's numbers for these reductions
MOST = 64  # nodes of a graph that are looked at

Number = Tensor | float
Look = Callable[[Any], Number]  # how a number is taken from a node


def takes_row(node: Any, ends: set[Any]) -> bool:
    """Return whether what a node has made is of one row of the output, and of nothing else."""
    for _ in range(MOST):
        if node is None or node in ends:
            return False
        if type(node).__name__ in TAKEN and node._saved_dim == 0:
            return True
        below = [each for each, _ in node.next_functions if each is not None]
        if len(below) != 1 or type(node).__name__ == JOINED:
            return False
        node = below[0]
    return False


def makes_number(node: Any) -> bool:
    """Return whether a node of torch's makes a number of numbers: an absolute value, a root, the larger of two."""
    if node is None or isinstance(node, BackwardCFunction) or node._input_metadata[0].shape:
        return False
    below = [each for each in node.next_functions if each[0] is not None]
    return bool(below) and not any(each._input_metadata[place].shape for each, place in below)


def is_along_rows(node: Any) -> bool:
    """Return whether it is along the first dimension, which has the rows of a batch; a mean or sum of all always is."""
    if not getattr(node, "_saved_dim", None):
        return True
    signed = (dim - 2**64 if dim >= 2**63 else dim for dim in node._saved_dim)  # which torch shows without its sign
    return any(dim % len(node._saved_self_sym_sizes) == 0 for dim in signed)


def is_one(node: Any) -> bool:
    shape: list[int] = node._input_metadata[0].shape
    return prod(shape) == 1


def scaled_by(name: str, below: list[Any]) -> list[tuple[Any, Look, int]]:
    """Return what a product or quotient is made of: each node below, and what it is multiplied with or divided by."""
    if name.startswith("MulBackward"):
        return [(each, by, 1) for each, by in zip(below, (_other, _itself), strict=False) if each is not None]
    if name.startswith("DivBackward") and below[0] is not None and not any(below[1:]):
        return [(below[0], _other, -1)]
    return []


def reaches(node: Any, ends: set[Any]) -> bool:
    """Return whether it is one of these nodes, or one is below; of a large graph, whether there are any."""
    if node in ends:
        return True
    todo, seen = [node], 0
    while todo and ends and seen < MOST:
        for each, _ in todo.pop().next_functions:
            if each in ends:
                return True
            todo += [] if each is None else [each]
        seen += 1
    return bool(todo and ends)


def entries_of_loss(node: Any, name: str) -> Look | None:
    """Return how to see over how many entries one of torch's losses takes the mean; None of any other node."""
    if getattr(node, "_saved_reduction", None) not in (MEAN, SUM):
        return None
    return _weight_of_all if name in NEGATIVE_LOG_LIKELIHOOD else _entries_of_all


def entries_of_mean(node: Any) -> Number:
    """Return over how many entries a mean is taken, along some dimensions or all."""
    return float(node._saved_self_sym_numel / (prod(node._input_metadata[0].shape) or 1))


def _weight_of_all(node: Any) -> Number:
    return node._saved_total_weight.detach() if node._saved_reduction == MEAN else 1.0


def slope_of(place: int, node: Any) -> Number:
    """Return how much a number changes with one of those that it is made of."""
    made = node._input_metadata[0]
    with torch.no_grad():
        slopes = node(torch.ones((), dtype=made.dtype, device=made.device))
    slope: Tensor = slopes[place] if isinstance(slopes, tuple) else slopes
    return slope


def mean_of_columns(look: Look, node: Any) -> Number:
    """Return a mean of many numbers, which two have alike only where they have them all alike."""
    by = look(node)
    if not isinstance(by, Tensor):
        return by
    weights = torch.arange(1, by.numel() + 1, device=by.device).sqrt()
    return (by.detach().flatten() * weights).sum() / weights.sum()


def _entries_of_all(node: Any) -> Number:
    """Return over how many entries another of torch's own losses takes the mean."""
    return float(prod(shape_below(node))) if node._saved_reduction == MEAN else 1.0


def shape_below(node: Any) -> list[int]:
    edge, place = next(each for each in node.next_functions if each[0] is not None)
    shape: list[int] = edge._input_metadata[place].shape
    return shape


def _other(node: Any) -> Number:
    return _plain(node._saved_other)


def _itself(node: Any) -> Number:
    return _plain(node._saved_self)


def is_many(by: Number) -> bool:
    return isinstance(by, Tensor) and by.dim() > 0  # with one entry too, which may be that of the only row


def _plain(saved: Any) -> Number:
    if isinstance(saved, Tensor):
        return saved.detach() if saved.requires_grad else saved
    return float(saved)
