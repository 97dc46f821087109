"""Whether the entries of a batch count alike, whichever microbatch or replica they are in.

What each counts in the loss of the batch is what it counts in the loss of its own microbatch (`reading`), times the
share of that. Microbatches are compared on the rank of the last stage, and replicas by one of their microbatches each,
when they meet at the end of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ModelError
from penstock.runtime.loss.nodes import Number
from penstock.runtime.loss.reading import Term

COARSE = 1e-4  # rounding of numbers that a sum of many terms is not computed in
ADDED = 1e-7  # what people add to a divisor so that it is not 0, beside it

REMEDY = (
    "say what it is a mean over with LossOptions(weight=), a function of anything that step() is passed, by name, "
    "such as lambda labels: (labels != -100).sum()"
)


class EntryCount(NamedTuple):
    """One term of the loss of one microbatch."""

    value: float  # of each entry, in that loss
    share: float  # of that loss, in the loss of the batch
    weight: float  # the share before it is divided by that of all
    rows: float
    entries: int  # of the output


class TermCounts(NamedTuple):
    """One term of the losses of several microbatches or replicas, by number."""

    counted: Mapping[int, EntryCount]
    is_weighted: bool
    of_rows: bool
    is_read: bool
    slack: float  # how far apart rounding may bring equal values
    measure: str  # what weights are counted by, in words
    by_rows: bool

    def unevenness(self, of: str = "microbatches") -> tuple[str, str] | None:
        """Return what is wrong, and what to do; None where each entry counts alike, or nobody can tell."""
        each = self.counted
        counts = {number: by.value * by.share for number, by in each.items()}
        if not all(map(math.isfinite, counts.values())) or self._alike(counts.values()):
            return None
        values = [by.value for by in each.values()]
        if self._alike(values) and (self.is_weighted or not self.of_rows or not self.is_read):
            return None
        if self.is_weighted and self._alike([by.value * by.rows for by in each.values()]):
            return None  # Their own weights have a mean of 1.
        if self.by_rows and self._alike([counts[number] * by.entries / by.rows for number, by in each.items()]):
            return None  # It is a mean over all entries of rows, which are longer in some microbatches.
        one, two = sorted((min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)))
        over = [1 / each[number].value if each[number].value else math.inf for number in (one, two)]
        what, remedy = f"are means over {over[0]:g} and {over[1]:g} entries", REMEDY
        if min(values) <= 0:
            what = f"have entries that count {each[one].value:g} and {each[two].value:g}"
        if over[0] <= 1 and self._alike(values):
            what, remedy = "are sums", f"pass LossOptions(reduction='sum') if they add up, or {REMEDY}"
        return (
            f"the losses of {of} {one} and {two} {what}, but count as {each[one].weight:g} and {each[two].weight:g}, "
            f"by {self.measure}: neither the batch's loss nor its gradients would be those of the whole batch in one "
            f"piece"
        ), remedy

    def _alike(self, values: Any) -> bool:
        least, most = min(values), max(values)
        return bool(most - least <= self.slack * max(abs(least), abs(most)))

    def for_replicas(self) -> tuple[Any, ...]:
        """Return one of the microbatches, and what is known of all, in plain values."""
        return tuple(next(iter(self.counted.values()))), *self[1:]


def term_counts(
    terms: Sequence[Term], counted: Mapping[int, EntryCount], numbers: Sequence[Number], measure: Any, by_rows: bool
) -> TermCounts:
    """Return one term of several losses, which may have other forms; `numbers` are those of one of them."""
    if any(term.has_columns for term in terms):  # A column of which nothing counts may be divided by 1 for any rows.
        rows = next(iter(counted.values())).rows
        counted = {number: each for number, each in counted.items() if each.rows == rows}
    slack = max((_slack(numbers[by]) for by, _ in terms[0].factors), default=_slack(1.0))
    return TermCounts(
        counted,
        is_weighted=any(term.is_weighted for term in terms),
        of_rows=any(term.of_rows for term in terms),
        is_read=all(term.is_read for term in terms),
        slack=slack,
        measure=str(measure),
        by_rows=by_rows,
    )


def compare_replicas(answers: Sequence[Sequence[tuple[Any, ...]]]) -> None:
    """Raise if an entry counts more in one replica than in another; `answers` are those of each, by term."""
    known = {number: answer for number, answer in enumerate(answers) if answer}
    if len({tuple(kind[1:4] for kind in answer) for answer in known.values()}) != 1:
        return  # Their losses have other terms, of which nobody can tell.
    for terms in zip(*known.values(), strict=True):
        counted = {number: EntryCount(*term[0]) for number, term in zip(known, terms, strict=True)}
        slack = max(term[4] for term in terms)
        found = TermCounts._make((counted, *terms[0][1:4], slack, *terms[0][5:])).unevenness("replicas")
        if found is not None:
            raise ModelError("; ".join(found))


def _slack(number: Number) -> float:
    """Return how far apart rounding may bring equal numbers: a coarse one is rounded once, when it has been summed."""
    kind = number.dtype if isinstance(number, Tensor) and number.is_floating_point() else torch.float64
    eps = torch.finfo(kind).eps
    return 2 * eps if eps >= COARSE else max(32 * eps, ADDED)
