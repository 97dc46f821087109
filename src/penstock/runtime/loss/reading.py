"""What a loss is made of, read off the upper end of its graph: sums and means of terms, scaled, divided, and added up.

Nobody has to state what a loss is a mean over where its graph has it: in a lambda, in a wrapper of the user's, in a
Hugging Face model that takes `labels`. Reading takes a microsecond, and waits for no device: numbers that are there
stay tensors, and are looked at when the step ends.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

NEGATIVE_LOG_LIKELIHOOD = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
MEANS = frozenset({"MeanBackward0", "MeanBackward1"})
SUMS = frozenset({"SumBackward0", "SumBackward1", "NansumBackward0"})
ADDED = frozenset({"AddBackward0", "SubBackward0", "SubBackward1", "NegBackward0"})
PRODUCTS = frozenset({"DotBackward0", "VdotBackward0", "MvBackward0", "MmBackward0", "BmmBackward0"})
SAME = frozenset({
    "ToCopyBackward0", "CloneBackward0", "AliasBackward0", "ViewBackward0", "SqueezeBackward0", "PermuteBackward0",
})  # fmt: skip
PARAMETER = "torch::autograd::AccumulateGrad"
MEAN, SUM = 1, 2  # torch's numbers for these reductions
MOST = 64  # nodes of a graph that are looked at

Number = Tensor | float


class Term(NamedTuple):
    """One reduction in a loss."""

    node: Any  # of the graph, where that is torch's cross-entropy or negative log-likelihood
    factors: tuple[tuple[Number, int], ...]  # numbers that its sum is multiplied with (1) or divided by (-1)
    of_rows: bool = True  # it sums what is of rows of the batch, and not of parameters alone
    is_weighted: bool = False  # by constants, each entry by its own, which may hold what it is divided by

    @property
    def is_mean(self) -> bool:
        """Whether torch itself divides the likelihood; else it is a sum."""
        return bool(self.node._saved_reduction == MEAN)

    def value(self, numbers: dict[int, float], plain: bool = True) -> float:
        """Compute the factor of each entry that is summed; not `plain`: without the numbers that are no tensors."""
        each = [(numbers[id(by)] if isinstance(by, Tensor) else by, power) for by, power in self._those(plain)]
        over = prod(by for by, power in each if power < 0)
        return prod(by for by, power in each if power > 0) / over if over else float("nan")

    def _those(self, plain: bool) -> list[tuple[Number, int]]:
        return [each for each in self.factors if plain or each[1] < 0 or isinstance(each[0], Tensor)]


class Reading(NamedTuple):
    """What could be read of a loss."""

    terms: tuple[Term, ...]
    names: tuple[str, ...]  # of the nodes that were read
    is_complete: bool  # nothing of the loss is anything else

    @property
    def tensors(self) -> list[Tensor]:
        """The numbers that are still to be looked at."""
        return [by for term in self.terms for by, _ in term.factors if isinstance(by, Tensor)]


def read_loss(loss: Tensor, output: Any = None) -> Reading | None:
    """Read a loss from its root down to where terms are summed; None without a graph.

    Without the output that it is of, only a likelihood, or a term that is the only one, is known to be of rows.
    """
    if loss.grad_fn is None:
        return None
    terms: list[Term] = []
    names: list[str] = []
    below_terms: list[Any] = []
    is_complete, ends = True, _ends(output)
    todo: list[tuple[Any, tuple[tuple[Number, int], ...]]] = [(loss.grad_fn, ())]
    while todo and len(names) < MOST:
        node, factors = todo.pop()
        name = node.name()
        names.append(name)
        below = [each for each, _ in node.next_functions]
        scaled = _scaled(node, name, below)
        if name in SAME or name in ADDED:
            todo += [(each, factors) for each in below if each is not None]
        elif scaled:
            todo += [(each, (*factors, (_number(by), power))) for each, by, power in scaled]
        else:
            over = _entries(node, name, below)
            is_complete &= over is not None
            if over is not None:
                inside, is_weighted = _inside(node, name, ends)
                factors = (*factors, *inside, (over, -1))
                is_weighted &= not any(isinstance(by, Tensor) for by, _ in factors)
                terms.append(Term(node if name in NEGATIVE_LOG_LIKELIHOOD else None, factors, is_weighted=is_weighted))
                below_terms.append(node)
                is_complete &= not is_weighted
    if len(terms) > 1:
        terms = [
            each._replace(of_rows=each.node is not None or _reaches(node, ends))
            for each, node in zip(terms, below_terms, strict=True)
        ]
    return Reading(tuple(terms), tuple(names), is_complete and not todo)


def _ends(output: Any) -> set[Any]:
    """Return the nodes of the graph that have made an output."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return {get_gradient_edge(leaf).node for leaf in leaves}


def _reaches(node: Any, ends: set[Any]) -> bool:
    """Return whether one of these nodes is below; of a large graph, whether there are any."""
    todo, seen = [node], 0
    while todo and ends and seen < MOST:
        for each, _ in todo.pop().next_functions:
            if each in ends:
                return True
            todo += [] if each is None else [each]
        seen += 1
    return bool(todo and ends)


def _scaled(node: Any, name: str, below: list[Any]) -> list[tuple[Any, Any, int]]:
    """Return what a product or quotient is made of: each node below, and what it is multiplied with or divided by."""
    if name.startswith("MulBackward"):
        saved = ("_saved_other", "_saved_self")
        return [(each, getattr(node, by), 1) for each, by in zip(below, saved, strict=False) if each is not None]
    if name.startswith("DivBackward") and below[0] is not None and not any(below[1:]):
        return [(below[0], node._saved_other, -1)]
    return []


def _inside(node: Any, name: str, ends: set[Any]) -> tuple[tuple[tuple[Number, int], ...], bool]:
    """Return what all entries of a sum or mean are scaled by, and whether each also is by a number of its own."""
    factors: list[tuple[Number, int]] = []
    is_weighted = name in PRODUCTS
    following = node.next_functions[0][0] if ends and (name in SUMS or name in MEANS) else None
    while following is not None and following not in ends:
        name, below = following.name(), [each for each, _ in following.next_functions]
        scaled = _scaled(following, name, below)
        if name in SAME:
            following = below[0]
        elif len(scaled) == 1:
            following, by, power = scaled[0]
            if isinstance(by, Tensor) and by.dim():  # of one entry too, which may be the only row
                is_weighted = True
            else:
                factors.append((_number(by), power))
        else:
            following = None
    return tuple(factors), is_weighted


def _entries(node: Any, name: str, below: list[Any]) -> Number | None:
    """Return over how many entries a node takes the mean: 1 of a sum, and None where it is none of both."""
    if name in SUMS or name == PARAMETER or (name in PRODUCTS and prod(node._input_metadata[0].shape) == 1):
        return 1.0
    if name in MEANS:
        return float(node._saved_self_sym_numel)
    if name in NEGATIVE_LOG_LIKELIHOOD:
        return node._saved_total_weight.detach() if node._saved_reduction == MEAN else 1.0
    reduction = getattr(node, "_saved_reduction", None)  # another of torch's own losses
    if reduction == MEAN:
        edge, place = next(each for each in node.next_functions if each[0] is not None)
        return float(prod(edge._input_metadata[place].shape))
    return 1.0 if reduction == SUM else None


def _number(saved: Any) -> Number:
    return saved.detach() if isinstance(saved, Tensor) else float(saved)


def names_below(loss: Tensor, output: Any) -> tuple[str, ...]:
    """Return the names of what a loss computes from the output, in the order of a walk through its graph."""
    ends = _ends(output)
    found: list[str] = []
    todo = [loss.grad_fn]
    while todo and len(found) < MOST:
        node = todo.pop()
        if node is not None and node not in ends:
            found.append(node.name())
            todo += [each for each, _ in node.next_functions]
    return tuple(found)


def fetch(tensors: list[Tensor]) -> dict[int, float]:
    """Bring numbers to the host, by the id of each tensor; those on a device with one copy of all."""
    found = {id(each): float(each.item()) for each in tensors if each.device.type == "cpu"}
    away = [each.detach() for each in tensors if each.device.type != "cpu"]
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, each in enumerate(away):
        kinds.setdefault((each.dtype, each.device), []).append(place)
    if kinds:
        there = away[0].device
        packed = [torch.stack([away[n] for n in places]).to(there, torch.float64) for places in kinds.values()]
        order = [place for places in kinds.values() for place in places]
        numbers = dict(zip(order, torch.cat(packed).tolist(), strict=True))
        originals = [each for each in tensors if each.device.type != "cpu"]
        found |= {id(each): numbers[place] for place, each in enumerate(originals)}
    return found
