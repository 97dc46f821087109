"""What a loss is made of, read off the upper end of its graph: sums and means of terms, scaled, divided, and added up.

Nobody has to state what a loss is a mean over where its graph has it: in a lambda, in a wrapper of the user's, in a
Hugging Face model that takes `labels`. A graph is analysed once (`Form`); of later losses with the same nodes only the
numbers are taken, which costs a microsecond or two. Reading waits for no device: numbers that are there stay tensors,
and are looked at when the step ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from math import nan, prod
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from penstock.runtime.loss.nodes import (
    MOST,
    NEGATIVE_LOG_LIKELIHOOD,
    SUM,
    Look,
    Number,
    entries_of_loss,
    entries_of_mean,
    is_along_rows,
    is_many,
    is_one,
    makes_number,
    mean_of_columns,
    reaches,
    scaled_by,
    shape_below,
    slope_of,
    takes_row,
)

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

Factors = tuple[tuple[int, int], ...]  # which numbers of a form something is multiplied with (1) or divided by (-1)


class Term(NamedTuple):
    """One reduction in a loss."""

    factors: Factors  # of the sum
    likelihood: int | None = None  # which node it is, where that is torch's cross-entropy or negative log-likelihood
    of_rows: bool = True  # it sums what is of rows of the batch, and not of parameters alone
    is_weighted: bool = False  # by constants, each entry by its own, which may hold what it is divided by
    is_read: bool = True  # as a sum; of anything else only the factors are known, and not whether it is a mean
    is_of_row: bool = False  # of a single row, as a loop over rows makes them
    above: int | None = None  # how many of the factors are of a sum of terms that it is a part of
    is_known: bool = True  # the factors are all there are
    has_columns: bool = False  # some of the factors are those of columns

    def value(self, numbers: Sequence[float]) -> float:
        """Compute the factor of each entry that is summed."""
        if not self.is_known:
            return nan
        over = prod(numbers[by] for by, power in self.factors if power < 0)
        return prod(numbers[by] for by, power in self.factors if power > 0) / over if over else float("nan")


@dataclass(eq=False, frozen=True, slots=True)
class Form:
    """What all losses consist of whose graphs have the same nodes."""

    terms: tuple[Term, ...]
    looks: tuple[tuple[int, Look], ...]  # where the numbers are: the place of a node, and how to take it from there
    weights: tuple[tuple[int, Look], ...]  # where tensors are that have a number for each entry
    is_complete: bool  # nothing of the loss is anything else
    is_cut: bool = False  # not all nodes were looked at

    def terms_of(self, rows: float) -> tuple[Term, ...]:
        """Return the terms, where those of single rows are one: what each row is divided by is its own affair.

        Its factors are what all rows are multiplied with; of a microbatch of one row, what stands above the loop's sum.
        """
        single = [term for term in self.terms if term.is_of_row]
        if not single or not rows or (len(single) % rows and not self.is_cut):
            return self.terms
        all_factors = zip(*(term.factors for term in single), strict=False)
        shared = tuple(each[0] for each in takewhile(lambda each: len(set(each)) == 1, all_factors))
        above = len(shared) if len(single) > 1 else single[0].above
        is_one_loop = len(single) == rows or self.is_cut  # Several may have nothing in common.
        together = single[0]._replace(factors=shared[:above], is_known=bool(above) and is_one_loop)
        return (*(term for term in self.terms if not term.is_of_row), together)

    def numbers(self, nodes: list[Any]) -> list[Number] | None:
        """Return the numbers of a loss with these nodes; None where what is one number here has many there."""
        found = [look(nodes[place]) for place, look in self.looks]
        many = any(map(is_many, found)) or not all(is_many(look(nodes[place])) for place, look in self.weights)
        return None if many else found


class Reading(NamedTuple):
    """The form of one loss, and its numbers; those that are still to be looked at are tensors."""

    form: Form
    numbers: list[Number]


Names = tuple[str, ...]
Forms = dict[Names, Form]  # of one loss function, by the names of the nodes in the order of the walk


def read_loss(loss: Tensor, output: Any, forms: Forms, rows: float = nan) -> tuple[Reading, list[Any]] | None:
    """Read a loss from its root down to where terms are summed, with the nodes of its graph; None without a graph.

    Without the output that it is of, only a likelihood, or a term that is the only one, is known to be of rows.

    Args:
        loss: A scalar.
        output: What it is computed from.
        forms: The forms of losses before.
        rows: How many rows the output has.
    """
    if loss.grad_fn is None:
        return None
    ends = _ends(output)
    names, nodes = _walk(loss.grad_fn, ends)
    form = forms.get(names)
    numbers = None if form is None else form.numbers(nodes)
    if form is None or numbers is None:
        analysis = _Analysis(nodes, ends, rows)
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
        is_loss = "Loss" in name or "Entropy" in name
        is_bent = not is_loss and name not in LEADING and name != "" and makes_number(node)
        kind = getattr(node, "_saved_reduction", "") if is_loss else "of a number" if is_bent else None
        names.append(name if kind is None else f"{name} {kind}")
        if is_bent or name in LEADING or (deep and name and node is not None):
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
    above: int | None = None  # how many of the factors are above the last sum of terms
    has_columns: bool = False  # among the factors
    columns: tuple[tuple[Any, Look, int], ...] = ()  # what columns are scaled by, if what follows is a sum over rows


class _Analysis:
    """The analysis of a graph: what is summed in a loss, and where the numbers are that scale it."""

    def __init__(self, nodes: list[Any], ends: set[Any], rows: float) -> None:
        self.places = {id(node): place for place, node in reversed([*enumerate(nodes)]) if node is not None}
        self.ends, self.rows = ends, rows
        self.slopes: set[int] = set()  # which of the numbers are slopes
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
        is_complete = not self.slopes and all(term.is_read and not term.is_weighted for _, term in found)
        if len(found) > 1:
            found = [(n, t._replace(of_rows=t.likelihood is not None or reaches(n, self.ends))) for n, t in found]
        # Of what is not read, factors are of use where it is of the output; else they may be any.
        terms = tuple(t for n, t in found if t.is_read or (t.of_rows and self.ends and reaches(n, self.ends)))
        return Form(terms, tuple(self.looks), tuple(self.weights), is_complete, len(self.places) >= MOST)

    def _below(self, at: _At) -> list[_At] | None:
        """Return where to go on from a place; None where a term ends."""
        node = at.node
        # Where the output is not known, nobody knows what of a sum is of the loss, and what of the model.
        if node in self.ends or id(node) not in self.places or (at.is_summed and not self.ends):
            return None
        name, below = node.name(), [each for each, _ in node.next_functions]
        if not at.is_summed and name not in LEADING and entries_of_loss(node, name) is None and makes_number(node):
            return self._bent(at, below)
        scaled = scaled_by(name, below)
        if name in SUMS or name in MEANS:
            # A mean of each row, in a sum over rows, is the row's own affair.
            is_of_rows = is_along_rows(node)
            counts = name in MEANS and (not at.is_summed or is_of_rows)
            mean = (self._factor(node, entries_of_mean, -1),) if counts else ()
            sizes = node._saved_self_sym_sizes if at.columns and is_of_rows else ()
            columns = at.columns if sizes[:1] == (self.rows,) else ()  # Each counts alike in all microbatches.
            factors = (*at.factors, *(self._factor(*each) for each in columns), *mean)
            at = at._replace(has_columns=at.has_columns or bool(columns), columns=())
            return [at._replace(node=below[0], factors=factors, is_summed=True)]
        is_joined = name == JOINED and at.is_summed and len(node._input_metadata[0].shape) == 1 and len(below) <= FEW
        if name in SAME or is_joined or (name in ADDED and (not at.is_summed or is_one(node))):
            above = at.above if name in SAME else len(at.factors)
            return [at._replace(node=each, columns=(), above=above) for each in below if each is not None]
        if len(scaled) > 1:  # A parameter counts by what it is multiplied with, whatever that is.
            scaled = [by for by in scaled if by[0].name() != PARAMETER and (not self.ends or reaches(by[0], self.ends))]
        if at.is_summed and len(scaled) == 1 and is_many(scaled[0][1](node)):
            (following, by, power) = scaled[0]
            self.weights.append((self.places[id(node)], by))
            columns = (*at.columns, (node, partial(mean_of_columns, by), power))
            return [at._replace(node=following, is_weighted=True, columns=columns)]
        if len(scaled) == 1 or (scaled and not at.is_summed):
            return [
                at._replace(node=e, factors=(*at.factors, self._factor(node, by, power))) for e, by, power in scaled
            ]
        return None

    def _bent(self, at: _At, below: list[Any]) -> list[_At]:
        """Return where to go on from a function of numbers: how much each counts there is its slope."""
        ways: list[_At] = []
        for place, each in enumerate(below):
            if each is not None and (not self.ends or reaches(each, self.ends)):
                slope = self._factor(at.node, partial(slope_of, place), 1)
                self.slopes.add(slope[0])
                ways.append(at._replace(node=each, factors=(*at.factors, slope)))
        return ways

    def _factor(self, node: Any, look: Look, power: int) -> tuple[int, int]:
        self.looks.append((self.places[id(node)], look))
        self.numbers.append(look(node))
        return len(self.looks) - 1, power

    def _term(self, at: _At) -> Term:
        node, factors, is_read, is_weighted, likelihood = at.node, at.factors, at.is_summed, at.is_weighted, None
        if id(node) in self.places and node not in self.ends:
            name = node.name()
            entries = entries_of_loss(node, name)
            is_product = name in PRODUCTS and is_one(node)
            is_read, is_weighted = is_read or is_product or name == PARAMETER, is_weighted or is_product
            if entries is not None:
                factors, is_read = (*factors, self._factor(node, entries, -1)), True
                likelihood = self.places[id(node)] if name in NEGATIVE_LOG_LIKELIHOOD else None
        if not is_read:  # It may be bent the other way, as a norm that is squared.
            factors = tuple(by for by in factors if by[0] not in self.slopes)
        is_weighted &= not any(isinstance(self.numbers[by], Tensor) for by, _ in factors)
        is_of_row = likelihood is None and bool(self.ends) and takes_row(node, self.ends)
        found = Term(factors, likelihood, is_weighted=is_weighted, is_read=is_read)
        return found._replace(is_of_row=is_of_row, above=at.above, has_columns=at.has_columns)


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
    return () if below.name() == PARAMETER else tuple(shape_below(node))
