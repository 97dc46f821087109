"""What a loss is made of, read off the upper end of its graph: sums and means of terms, scaled, divided, and added up.

Nobody has to state what a loss is a mean over where its graph has it: in a lambda, in a wrapper of the user's, in a
Hugging Face model that takes `labels`. A graph is analysed once (`Form`); of later losses with the same nodes only the
numbers are taken, which costs a microsecond or two. Reading waits for no device: numbers that are there stay tensors,
and are looked at when the step ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

NEGATIVE_LOG_LIKELIHOOD = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
MEANS = frozenset({"MeanBackward0", "MeanBackward1"})
SUMS = frozenset({"SumBackward0", "SumBackward1", "NansumBackward0"})
ADDED = frozenset({"AddBackward0", "SubBackward0", "SubBackward1", "NegBackward0"})
PRODUCTS = frozenset({"DotBackward0", "VdotBackward0", "MvBackward0", "MmBackward0", "BmmBackward0"})
JOINED = "StackBackward0"
FEW = 8  # losses that are stacked, and not one for each row
SAME = frozenset({
    "ToCopyBackward0", "CloneBackward0", "AliasBackward0", "ViewBackward0", "UnsafeViewBackward0", "TBackward0",
    "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "UnsqueezeBackward0", "PermuteBackward0",
    "TransposeBackward0",
})  # fmt: skip
SCALED = frozenset({"MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"})
LEADING = SAME | ADDED | {JOINED} | SCALED | MEANS | SUMS  # what may scale a term, or stand above several
PARAMETER = "torch::autograd::AccumulateGrad"
MEAN, SUM = 1, 2  # torch's numbers for these reductions
MOST = 64  # nodes of a graph that are looked at, and forms of a loss that are kept

Number = Tensor | float
Factors = tuple[tuple[int, int], ...]  # which numbers of a form something is multiplied with (1) or divided by (-1)
Look = Callable[[Any], Number]  # how a number is taken from a node


class Term(NamedTuple):
    """One reduction in a loss."""

    factors: Factors  # of the sum
    likelihood: int | None = None  # which node it is, where that is torch's cross-entropy or negative log-likelihood
    of_rows: bool = True  # it sums what is of rows of the batch, and not of parameters alone
    is_weighted: bool = False  # by constants, each entry by its own, which may hold what it is divided by
    is_read: bool = True  # as a sum; of anything else only the factors are known, and not whether it is a mean

    def value(self, numbers: Sequence[float]) -> float:
        """Compute the factor of each entry that is summed."""
        over = prod(numbers[by] for by, power in self.factors if power < 0)
        return prod(numbers[by] for by, power in self.factors if power > 0) / over if over else float("nan")


@dataclass(eq=False, frozen=True, slots=True)
class Form:
    """What all losses consist of whose graphs have the same nodes."""

    terms: tuple[Term, ...]
    looks: tuple[tuple[int, Look], ...]  # where the numbers are: the place of a node, and how to take it from there
    weights: tuple[tuple[int, Look], ...]  # where tensors are that have a number for each entry
    is_complete: bool  # nothing of the loss is anything else

    def numbers(self, nodes: list[Any]) -> list[Number] | None:
        """Return the numbers of a loss with these nodes; None where what is one number here has many there."""
        found = [look(nodes[place]) for place, look in self.looks]
        many = any(map(_is_many, found)) or not all(_is_many(look(nodes[place])) for place, look in self.weights)
        return None if many else found


class Reading(NamedTuple):
    """The form of one loss, and its numbers; those that are still to be looked at are tensors."""

    form: Form
    numbers: list[Number]


Names = tuple[str, ...]
Forms = dict[Names, Form]  # of one loss function, by the names of the nodes in the order of the walk


def read_loss(loss: Tensor, output: Any, forms: Forms) -> tuple[Reading, list[Any]] | None:
    """Read a loss from its root down to where terms are summed, with the nodes of its graph; None without a graph.

    Without the output that it is of, only a likelihood, or a term that is the only one, is known to be of rows.
    """
    if loss.grad_fn is None:
        return None
    ends = _ends(output)
    names, nodes = _walk(loss.grad_fn, ends)
    form = forms.get(names)
    numbers = None if form is None else form.numbers(nodes)
    if form is None or numbers is None:
        analysis = _Analysis(nodes, ends)
        form, numbers = analysis.form(nodes[0]), analysis.numbers
        if names in forms or len(forms) < MOST:
            forms[names] = form
    return Reading(form, numbers), nodes


def _ends(output: Any) -> set[Any]:
    """Return the nodes of the graph that have made an output."""
    if type(output) is Tensor and output.grad_fn is not None:
        return {output.grad_fn}
    leaves = pytree.tree_leaves(output)
    return {
        leaf.grad_fn or get_gradient_edge(leaf).node
        for leaf in leaves
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }


def _walk(root: Any, ends: set[Any], deep: bool = False) -> tuple[Names, list[Any]]:
    """Return the names of the nodes of a graph down to the terms, or (`deep`) to the output; and the nodes."""
    nodes: list[Any] = [root]
    names: list[str] = []
    for node in nodes:
        name = "" if node in ends else type(node).__name__
        names.append(f"{name} {getattr(node, '_saved_reduction', '')}" if "Loss" in name or "Entropy" in name else name)
        if name in LEADING or (deep and name and node is not None):
            nodes += [each for each, _ in node.next_functions]
        if len(names) == MOST:
            break
    return tuple(names), nodes


def names_below(loss: Tensor, output: Any) -> Names:
    """Return the names of what a loss computes from the output, in the order of a walk through its graph."""
    return () if loss.grad_fn is None else _walk(loss.grad_fn, _ends(output), deep=True)[0]


class _At(NamedTuple):
    """A place on the way down from a loss, and what is known of its part in it."""

    node: Any
    factors: Factors = ()
    is_summed: bool = False  # all of its entries are added up
    is_weighted: bool = False


class _Analysis:
    """The analysis of a graph: what is summed in a loss, and where the numbers are that scale it."""

    def __init__(self, nodes: list[Any], ends: set[Any]) -> None:
        self.places = {id(node): place for place, node in reversed([*enumerate(nodes)]) if node is not None}
        self.ends = ends
        self.looks: list[tuple[int, Look]] = []
        self.weights: list[tuple[int, Look]] = []
        self.numbers: list[Number] = []

    def form(self, root: Any) -> Form:
        """Return what losses with this graph consist of."""
        found: list[tuple[Any, Term]] = []
        todo = [_At(root)]
        while todo:
            at = todo.pop()
            below = self._below(at)
            todo += below or []
            if below is None:
                found.append((at.node, self._term(at)))
        is_complete = all(term.is_read and not term.is_weighted for _, term in found)
        if len(found) > 1:
            found = [(n, t._replace(of_rows=t.likelihood is not None or _reaches(n, self.ends))) for n, t in found]
        # Of what is not read, factors are of use where it is of the output; else they may be any.
        terms = tuple(t for n, t in found if t.is_read or (t.of_rows and self.ends and _reaches(n, self.ends)))
        return Form(terms, tuple(self.looks), tuple(self.weights), is_complete)

    def _below(self, at: _At) -> list[_At] | None:
        """Return where to go on from a place; None where a term ends."""
        node = at.node
        # Where the output is not known, nobody knows what of a sum is of the loss, and what of the model.
        if node in self.ends or id(node) not in self.places or (at.is_summed and not self.ends):
            return None
        name, below = node.name(), [each for each, _ in node.next_functions]
        scaled = _scaled(name, below)
        if name in SUMS or name in MEANS:
            # A mean of each row, in a sum over rows, is the row's own affair.
            counts = name in MEANS and (not at.is_summed or _is_along_rows(node, name))
            mean = (self._factor(node, _entries_of_mean, -1),) if counts else ()
            return [at._replace(node=below[0], factors=(*at.factors, *mean), is_summed=True)]
        is_joined = name == JOINED and at.is_summed and len(node._input_metadata[0].shape) == 1 and len(below) <= FEW
        if name in SAME or is_joined or (name in ADDED and (not at.is_summed or _is_one(node))):
            return [at._replace(node=each) for each in below if each is not None]
        if len(scaled) > 1:  # A parameter counts by what it is multiplied with, whatever that is.
            scaled = [
                by for by in scaled if by[0].name() != PARAMETER and (not self.ends or _reaches(by[0], self.ends))
            ]
        if at.is_summed and len(scaled) == 1 and _is_many(scaled[0][1](node)):
            self.weights.append((self.places[id(node)], scaled[0][1]))
            return [at._replace(node=scaled[0][0], is_weighted=True)]
        if len(scaled) == 1 or (scaled and not at.is_summed):
            return [
                at._replace(node=e, factors=(*at.factors, self._factor(node, by, power))) for e, by, power in scaled
            ]
        return None

    def _factor(self, node: Any, look: Look, power: int) -> tuple[int, int]:
        self.looks.append((self.places[id(node)], look))
        self.numbers.append(look(node))
        return len(self.looks) - 1, power

    def _term(self, at: _At) -> Term:
        node, factors, is_read, is_weighted, likelihood = at.node, at.factors, at.is_summed, at.is_weighted, None
        if id(node) in self.places and node not in self.ends:
            name = node.name()
            entries = _entries(node, name)
            is_product = name in PRODUCTS and _is_one(node)
            is_read, is_weighted = is_read or is_product or name == PARAMETER, is_weighted or is_product
            if entries is not None:
                factors, is_read = (*factors, self._factor(node, entries, -1)), True
                likelihood = self.places[id(node)] if name in NEGATIVE_LOG_LIKELIHOOD else None
        is_weighted &= not any(isinstance(self.numbers[by], Tensor) for by, _ in factors)
        return Term(factors, likelihood, is_weighted=is_weighted, is_read=is_read)


def _is_along_rows(node: Any, name: str) -> bool:
    """Return whether a mean is taken along the first dimension, which has the rows of a batch; of all it always is."""
    if name == "MeanBackward0":
        return True
    signed = (dim - 2**64 if dim >= 2**63 else dim for dim in node._saved_dim)  # which torch shows without its sign
    return any(dim % len(node._saved_self_sym_sizes) == 0 for dim in signed)


def _is_one(node: Any) -> bool:
    shape: list[int] = node._input_metadata[0].shape
    return prod(shape) == 1


def _scaled(name: str, below: list[Any]) -> list[tuple[Any, Look, int]]:
    """Return what a product or quotient is made of: each node below, and what it is multiplied with or divided by."""
    if name.startswith("MulBackward"):
        return [(each, by, 1) for each, by in zip(below, (_other, _itself), strict=False) if each is not None]
    if name.startswith("DivBackward") and below[0] is not None and not any(below[1:]):
        return [(below[0], _other, -1)]
    return []


def _reaches(node: Any, ends: set[Any]) -> bool:
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


# -- how numbers are taken from nodes


def _entries(node: Any, name: str) -> Look | None:
    """Return how to see over how many entries one of torch's losses takes the mean; None of any other node."""
    if getattr(node, "_saved_reduction", None) not in (MEAN, SUM):
        return None
    return _weight_of_all if name in NEGATIVE_LOG_LIKELIHOOD else _entries_of_all


def _entries_of_mean(node: Any) -> Number:
    """Return over how many entries a mean is taken, along some dimensions or all."""
    return float(node._saved_self_sym_numel / (prod(node._input_metadata[0].shape) or 1))


def _weight_of_all(node: Any) -> Number:
    return node._saved_total_weight.detach() if node._saved_reduction == MEAN else 1.0


def _entries_of_all(node: Any) -> Number:
    """Return over how many entries another of torch's own losses takes the mean."""
    return float(prod(_shape_below(node))) if node._saved_reduction == MEAN else 1.0


def _shape_below(node: Any) -> list[int]:
    edge, place = next(each for each in node.next_functions if each[0] is not None)
    shape: list[int] = edge._input_metadata[place].shape
    return shape


def _other(node: Any) -> Number:
    return _plain(node._saved_other)


def _itself(node: Any) -> Number:
    return _plain(node._saved_self)


def _is_many(by: Number) -> bool:
    return isinstance(by, Tensor) and by.dim() > 0  # with one entry too, which may be that of the only row


def _plain(saved: Any) -> Number:
    if isinstance(saved, Tensor):
        return saved.detach() if saved.requires_grad else saved
    return float(saved)


def sums_rows(reading: Reading, nodes: list[Any], rows: int) -> bool:
    """Return whether a loss, whose output is not known, adds something up over rows that nothing divides by them."""
    numbers = [float(by) for by in reading.numbers]
    is_large = any(abs(term.value(numbers)) * rows > 1 for term in reading.form.terms)
    return is_large and any(_sizes_summed(node)[:1] == (rows,) for node in nodes if node is not None)


def _sizes_summed(node: Any) -> tuple[int, ...]:
    """Return the sizes of what a node adds up; nothing where it does not, or of a parameter alone."""
    if node.name() not in SUMS and getattr(node, "_saved_reduction", None) != SUM:
        return ()
    below = node
    for _ in range(FEW):
        following = [each for each, _ in below.next_functions if each is not None]
        if len(following) != 1:
            break
        below = following[0]
    return () if below.name() == PARAMETER else tuple(_shape_below(node))
