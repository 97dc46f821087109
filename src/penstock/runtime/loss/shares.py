"""Each microbatch's share of the batch's loss, in one step, on the rank of the last stage.

What microbatches weigh is given by the user (`LossOptions`), known of the loss (torch's own
cross-entropy), or else found out when the first loss of the step has been computed: before the first backward needs a
share. If that loss has a cross-entropy of something in the batch, its entries are what counts; if it is a sum, losses
add up; else rows count. What was found out holds for later steps.

Whether it is right shows in every step: each term of the batch must count alike, whichever microbatch it is in. What
terms are divided by is read off the graph of each loss, and compared when the step ends (`check`).

A gradient is right when its seed is: each microbatch's loss is seeded with its share of the batch, and `.grad` is never
touched afterwards. So several steps before one optimizer step just add, tied parameters are not scaled twice, and hooks
see final numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ModelError, UsageError
from penstock.runtime.batch.microbatch import Batch
from penstock.runtime.loss.evenness import REMEDY, EntryCount, TermCounts, term_counts
from penstock.runtime.loss.loss_options import LossOptions
from penstock.runtime.loss.losses import is_elementwise, torch_reduction
from penstock.runtime.loss.nodes import SUM as SUMMED
from penstock.runtime.loss.reading import Form, Forms, Reading, read_loss, sums_rows
from penstock.runtime.loss.weights import Entries, Measure, WeightFunction, cross_entropy, find_entries

ITEMS = "num_items_in_batch"


class _MeanOverRows:
    """A mean over rows; where nothing says how many there are, all microbatches count alike."""

    def __call__(self, batch: Batch) -> list[float]:
        return batch.row_counts()

    def __str__(self) -> str:
        return "rows"


class _LossesAddUp:
    """A sum: microbatches have no weights."""

    def __call__(self, batch: Batch) -> None:
        return None

    def __str__(self) -> str:
        return "a sum"


ROWS, SUM = _MeanOverRows(), _LossesAddUp()


def as_plain(measure: Measure | None) -> Any:
    """A measure that was found out, in plain values that can be told to others."""
    if not isinstance(measure, Entries):
        return None if measure is None else str(measure)
    classes = None if measure.classes is None else measure.classes.tolist()
    return [list(measure.place), measure.shift, measure.ignored, classes]


def from_plain(said: Any) -> Measure:
    """The measure that was told."""
    if isinstance(said, str):
        return SUM if said == str(SUM) else ROWS
    place, shift, ignored, classes = said
    weights = None if classes is None else torch.tensor(classes, dtype=torch.float64, device="cpu")
    return Entries((place[0], place[1], place[2]), shift, ignored, weights)


class OtherReplicas(Protocol):
    """What is asked of the replicas that have batches of their own."""

    replicas: int

    def total(self, weight: float) -> Callable[[], float]:
        """What the batches of all replicas weigh, to be asked for later."""

    def compare(self, value: Any) -> list[Any]:
        """What every replica says at this place of the step, at once."""


class Weighing:
    """A pipeline's loss and how its microbatches weigh; another loss has another one."""

    draws = False  # random numbers, so that there is nothing to compare

    def __init__(
        self,
        loss_fn: Callable[..., Any] | None,
        options: LossOptions,
        names: Sequence[str],
        uneven: Callable[[str], None] | None = None,
    ) -> None:
        self.loss_fn = loss_fn
        self.options = options
        self.uneven = uneven  # is called with a difference, in the place of an error
        self._counted = None if options.weight is None else WeightFunction(options.weight, tuple(names))
        self._found: dict[Hashable, Measure] = {}  # by what the batch consists of
        self._warned = False
        self.forms: Forms = {}  # of the graphs that the loss has had
        self._is_plain = options == LossOptions()
        self._may_change = not isinstance(loss_fn, FunctionType | None)
        self._look()

    def _look(self) -> None:
        """Take the loss as it is now: what torch's own losses are told by their attributes may change between steps."""
        options, loss_fn, known = self.options, self.loss_fn, None
        self._given: Measure | None = None
        self._reduction = torch_reduction(loss_fn, {})
        if options.reduction == "sum" or (options.reduction is None and self._reduction == "sum"):
            self._given = SUM
        elif self._counted is not None:
            self._given = self._counted
        elif options.per_microbatch:
            self._given = ROWS
        else:
            self._given = known = cross_entropy(loss_fn)
        self.is_checked = not options.per_microbatch and known is None
        # One of torch's own losses that compares each entry with its target.
        self.is_elementwise = self._is_plain and is_elementwise(loss_fn)

    def cannot_tell(self, why: str) -> None:
        """Warn, once."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"whether the losses of microbatches add up to the loss of the batch could not be checked: {why}. If "
                f"it is neither a mean over rows nor a cross-entropy, see LossOptions(weight=) and (reduction=); "
                f"LossOptions(per_microbatch=True) confirms that it is as you mean it",
                stacklevel=2,
            )

    def looks_at(self, name: str | int) -> bool:
        """Whether the weight looks at that argument of step(), by its name or position."""
        return self._given is self._counted is not None and self._counted.looks_at(name)

    @property
    def when(self) -> str:
        """When replicas know what their batches weigh: "before" a step, "during" it, at the first loss, or "never"."""
        if self._may_change:
            self._look()
        return "never" if self._given is SUM else "before" if self._given is not None or self._found else "during"

    @property
    def reads(self) -> bool:
        """Whether what losses are divided by is read off their graphs."""
        return (self.is_checked or self.uneven is not None) and not self.draws and not self.is_elementwise

    def measure(self, batch: Batch, replicas: int) -> Measure | None:
        """What the microbatches of this batch are measured by, if that is known before they have run."""
        told = batch.loss_kwargs[0]
        if self._given is None and (torch_reduction(self.loss_fn, told) if told else self._reduction) == "sum":
            return SUM
        found = self._given or self._found.get(_consists_of(batch, replicas))
        if not isinstance(found, Entries) or found.is_there(batch):
            return found
        if replicas > 1:
            raise ModelError(f"replicas' batches are weighed by {found}, of which this one has none; {REMEDY}")
        return None

    def learn(self, measure: Measure, batch: Batch, replicas: int) -> None:
        """What was found out about this batch holds for later ones."""
        self._found[_consists_of(batch, replicas)] = measure


def _consists_of(batch: Batch, replicas: int) -> Hashable:
    """Replicas must know the same at any time, whatever each of them is given."""
    if replicas > 1:
        return None
    named = [*batch.kwargs[0].items(), *batch.loss_kwargs[0].items()]
    return len(batch.args[0]), batch.has_target, frozenset(name for name, value in named if value is not None)


class Shares:
    """Equal shares, for ranks that compute no loss."""

    wants_graph = False  # of a loss that is computed without one
    tensors: Sequence[Tensor] = ()  # the numbers that `check` looks at
    measure: Measure | None = None
    for_replicas: Sequence[Any] = ()  # what other replicas compare with what their losses are divided by
    is_elementwise = False  # whether the loss is one of torch's own that compares each entry with its target

    def __init__(self, count: int, share: float) -> None:
        self._shares = [share] * count

    def __call__(self) -> list[float]:
        """Of each microbatch, by its number."""
        return self._shares

    def if_counts(self, number: int) -> list[float] | None:
        """The shares, if the loss of that microbatch is a part of the batch's."""
        shares = self()
        return shares if shares[number] != 0 else None

    def read(self, number: int, output: Any, loss: Tensor) -> Form | None:
        """Read the loss of a microbatch off its graph, if that is of use."""
        return None

    def check(self, numbers: dict[int, float]) -> list[float]:
        """Return the shares, at the end of a step; raise where terms of the batch do not count alike."""
        return self()


class BatchShares(Shares):
    """The shares of one batch's microbatches, from their weights."""

    def __init__(self, weighing: Weighing, batch: Batch, replicas: OtherReplicas, training: bool) -> None:
        super().__init__(len(batch.args), 1.0)
        when = weighing.when  # This takes the loss as it is now.
        self._weighing, self._batch, self._replicas = weighing, batch, replicas
        self.is_elementwise = weighing.is_elementwise
        self._reads = weighing.reads
        self._late = when == "during" and replicas.replicas > 1
        self._settled = False
        self._empty: set[int] = set()  # microbatches that weigh nothing, while nothing is known of others
        self._readings: dict[int, Reading] = {}  # by microbatch
        self._entries: dict[int, int] = {}  # of the output, by microbatch
        self.for_replicas: list[Any] = []
        self._total: Callable[[], float] | None = None
        self._refused: ModelError | UsageError | None = None
        self.weights: list[float] | None = None  # None: losses add up, or nothing is known yet
        self.measure = None
        try:
            self.measure = weighing.measure(batch, replicas.replicas)
            self.weights = None if self.measure is None else self.measure(batch)
        except (ModelError, UsageError) as error:  # in an evaluation that has no loss, nobody will ask
            if training:
                raise
            self._refused = error
        if self.measure is not None or self._refused is not None:
            if when == "before" and replicas.replicas > 1:
                self._total = replicas.total(sum(self.weights or ()))
            if replicas.replicas == 1 and training:
                self()

    @property
    def wants_graph(self) -> bool:  # type: ignore[override]
        return self.measure is None

    def __call__(self) -> list[float]:
        if self._settled:
            return self._shares
        if self._refused is not None:
            raise self._refused
        if self._late:
            self._compare()
        if self.weights is not None or self.measure is None:
            total = sum(self.weights or ()) if self._total is None else self._total()
            if not total > 0:
                raise ModelError(f"the microbatches weigh {total} in all; the mean loss of such a batch is not defined")
            self._shares = [weight / total for weight in self.weights or ()]
        self._settled = True
        return self._shares

    def if_counts(self, number: int) -> list[float] | None:
        if self._late:
            self()  # where replicas compare must not depend on what they have
        return None if number in self._empty else super().if_counts(number)

    def weight(self, number: int) -> float | None:
        """Of a microbatch that was seen; None where losses add up."""
        if self.measure is None:
            return 0.0
        return None if self.weights is None else self.weights[number]

    @property
    def tensors(self) -> list[Tensor]:  # type: ignore[override]
        return [by for reading in self._readings.values() for by in reading.numbers if isinstance(by, Tensor)]

    def read(self, number: int, output: Any, loss: Tensor) -> Form | None:
        if not self._reads and self.measure is not None:
            return None
        weighing = self._weighing
        rows = self._batch.row_counts()[number]
        found = read_loss(loss, None if weighing.loss_fn is None else output, weighing.forms, rows)
        if self.measure is None:
            self._learn(number, *(found or (None, [])))
        if found is None:
            return None
        self._readings[number] = found[0]
        self._entries[number] = output.numel() if type(output) is Tensor else _most_entries(output)
        return found[0].form

    def _learn(self, number: int, reading: Reading | None, nodes: list[Any]) -> None:
        """Find out what counts from the likelihood in a loss: before a backward, and so waiting for the device."""
        terms = () if reading is None else reading.form.terms
        term = next((each for each in terms if each.likelihood is not None), None)
        own = self._weighing.loss_fn is None
        if reading is None or term is None or term.likelihood is None:
            if own and reading is not None:
                self._check_own(number, reading, nodes)
            self._take(ROWS)
            return
        node = nodes[term.likelihood]
        if node._saved_reduction == SUMMED:
            adds = all(is_items(reading.numbers[by], self._batch, number) for by, _ in term.factors[:-1])
            self._take(SUM if adds else ROWS)
        elif node._saved_total_weight.item() == 0:  # all is ignored; others will tell what of
            self._empty.add(number)
        else:
            entries = find_entries(node, self._batch, number)
            if entries is None and own:
                self._weighing.cannot_tell(
                    "the model computes it, a cross-entropy with targets that step() was not passed; they may be rows "
                    "of a microbatch that it compares with each other"
                )
            self._take(entries or ROWS)

    def _check_own(self, number: int, reading: Reading, nodes: list[Any]) -> None:
        """Raise if the loss that the model computes is a sum over rows, and nobody has said whether they add up."""
        rows = self._batch.row_counts()[number]
        if self._weighing.options.reduction is None and rows == int(rows) and sums_rows(reading, nodes, int(rows)):
            raise ModelError(
                f"the loss that the model computes is a sum over the {rows:g} rows of microbatch {number}, and nothing "
                f"divides it by them; pass LossOptions(reduction='sum') if the losses of microbatches add up, or "
                f"LossOptions(reduction='mean') if each is a mean all the same"
            )

    def _take(self, measure: Measure) -> None:
        if measure is SUM and self._weighing.options.reduction == "mean":
            raise ModelError(
                "LossOptions(reduction='mean'), but the loss is a sum over its targets; pass reduction='sum'"
            )
        self.measure, self.weights = measure, measure(self._batch)
        if not self._late:
            self._weighing.learn(measure, self._batch, self._replicas.replicas)

    def _compare(self) -> None:
        """All replicas measure alike; one whose microbatches say nothing so far does as the others do."""
        found = [each for each in self._replicas.compare(as_plain(self.measure)) if each is not None]
        if not found:
            raise ModelError(f"the first microbatch of every replica has no target that counts; {REMEDY}")
        if any(each != found[0] for each in found):
            words = "; ".join(dict.fromkeys(str(from_plain(each)) for each in found))
            raise ModelError(f"the losses of replicas are means over different things ({words}); {REMEDY}")
        self.measure = from_plain(found[0])
        self.weights = self.measure(self._batch)
        self._weighing.learn(self.measure, self._batch, self._replicas.replicas)
        total = sum(self._replicas.compare(sum(self.weights or ())))
        self._total = lambda: total

    def check(self, numbers: dict[int, float]) -> list[float]:
        shares, weighing = self(), self._weighing
        read = {number: each for number, each in self._readings.items() if shares[number] != 0}
        alone = self._replicas.replicas == 1
        if len(read) <= alone or weighing.draws:
            return shares
        if weighing.loss_fn is None and not all(each.form.is_complete for each in read.values()):
            weighing.cannot_tell("the model computes it, and it is no sum of means, cross-entropies and parameters")
        values = {
            number: [numbers[id(by)] if isinstance(by, Tensor) else by for by in each.numbers]
            for number, each in read.items()
        }
        place = min(read)
        first, like = read[place], (shares[place], values[place])
        same = all(each.form is first.form and (shares[n], values[n]) == like for n, each in read.items())
        if same and alone:
            return shares  # nearly always
        for counts in self._term_counts(read, values, shares):
            found = counts.unevenness()
            if found is None:
                self.for_replicas += [] if alone else [counts.for_replicas()]
            elif weighing.uneven is None:
                raise ModelError("; ".join(found))
            else:
                weighing.uneven(found[0])
        return shares

    def _term_counts(
        self, read: Mapping[int, Reading], values: Mapping[int, list[float]], shares: list[float]
    ) -> Iterator[TermCounts]:
        """Yield the terms of all losses, where they have the same, or one each."""
        rows, weights, numbers = self._batch.row_counts(), self.weights or [1.0] * len(shares), read[min(read)].numbers
        forms = {n: each.form.terms_of(rows[n]) for n, each in read.items()}
        if len(set(forms.values())) != 1 and set(map(len, forms.values())) != {1}:
            return
        for index, terms in enumerate(zip(*forms.values(), strict=True)):
            counted = {
                n: EntryCount(each[index].value(values[n]), shares[n], weights[n], rows[n], self._entries[n])
                for n, each in forms.items()
            }
            yield term_counts(terms, counted, numbers, self.measure, self.measure is ROWS)


def _most_entries(output: Any) -> int:
    return max((leaf.numel() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)), default=1)


def is_items(factor: Tensor | float, batch: Batch, number: int) -> bool:
    """Return whether a factor is the number of tokens in the whole batch, as Hugging Face models are given it."""
    given = batch.kwargs[number].get(ITEMS)
    return given is not None and float(factor) == float(given)
