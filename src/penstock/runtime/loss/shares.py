"""Each microbatch's share of the batch's loss, in one step, on the rank of the last stage.

What microbatches weigh is told by the user (`LossOptions`), known of the loss (torch's own
cross-entropy), or else found out when the first loss of the step has been computed: before the first backward needs a
share. If that loss is a cross-entropy of something in the batch, its entries are what counts; if it is a sum, losses
add up; else rows count, and whether that is right is for `check` to say. What was found out holds for later
steps, in which every loss that shows what it was divided by must agree.

A gradient is right when its seed is: each microbatch's loss is seeded with its share of the batch, and `.grad` is never
touched afterwards. So several steps before one optimizer step just add, tied parameters are not scaled twice, and hooks
see final numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import ModelError, UsageError
from penstock.runtime.batch.microbatch import Batch
from penstock.runtime.loss.loss_options import LossOptions
from penstock.runtime.loss.losses import LossReading, torch_reduction
from penstock.runtime.loss.weights import Counted, Entries, Measure, cross_entropy, find_entries

ITEMS = "num_items_in_batch"

REMEDY = (
    "say what it is a mean over with LossOptions(weight=), a function of anything that step() is passed, by name, "
    "such as lambda labels: (labels != -100).sum()"
)


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
    """How the microbatches of one pipeline weigh."""

    def __init__(
        self,
        loss_fn: Callable[..., Any] | None,
        options: LossOptions,
        names: Sequence[str],
    ) -> None:
        self._loss_fn = loss_fn
        self.options = options
        self._given: Measure | None = None
        self.is_known = False  # by definition, so that there is nothing to check
        self._found: dict[Hashable, Measure] = {}  # by what the batch consists of
        if options.reduction == "sum" or (options.reduction is None and torch_reduction(loss_fn, {}) == "sum"):
            self._given = SUM
        elif options.weight is not None:
            self._given = Counted(options.weight, tuple(names))
        elif options.per_microbatch:
            self._given = ROWS
        elif (known := cross_entropy(loss_fn)) is not None:
            self._given, self.is_known = known, True

    def looks_at(self, name: str | int) -> bool:
        """Whether the weight looks at that argument of step(), by its name or position."""
        return isinstance(self._given, Counted) and self._given.looks_at(name)

    @property
    def when(self) -> str:
        """When replicas know what their batches weigh: "before" a step, "during" it, at the first loss, or "never"."""
        return "never" if self._given is SUM else "before" if self._given is not None or self._found else "during"

    @property
    def learns(self) -> bool:
        """Whether what losses are divided by is read off their graphs."""
        return self._given is None

    def measure(self, batch: Batch, replicas: int) -> Measure | None:
        """What the microbatches of this batch are measured by, if that is known before they have run."""
        if self._given is None and torch_reduction(self._loss_fn, batch.loss_kwargs[0]) == "sum":
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
    learns = False  # whether what losses are divided by is read off their graphs
    measure: Measure | None = None

    def __init__(self, count: int, share: float) -> None:
        self._shares = [share] * count

    def __call__(self) -> list[float]:
        """Of each microbatch, by its number."""
        return self._shares

    def if_counts(self, number: int) -> list[float] | None:
        """The shares, if the loss of that microbatch is a part of the batch's."""
        shares = self()
        return shares if shares[number] != 0 else None

    def saw(self, number: int, reading: LossReading | None) -> None:
        """What the graph of a microbatch's loss says, if anything."""

    def check(self) -> list[float]:
        """At the end of a step: the shares; raises where losses were divided by something else than was thought."""
        return self()


class BatchShares(Shares):
    """The shares of one batch's microbatches, from their weights."""

    def __init__(self, weighing: Weighing, batch: Batch, replicas: OtherReplicas, training: bool) -> None:
        super().__init__(len(batch.args), 1.0)
        self._weighing, self._batch, self._replicas = weighing, batch, replicas
        self.learns = weighing.learns
        self._late = weighing.when == "during" and replicas.replicas > 1
        self._settled = False
        self._empty: set[int] = set()  # microbatches that weigh nothing, while nothing is known of others
        self._divided: dict[int, Tensor] = {}  # by microbatch: over how much its loss is a mean
        self._total: Callable[[], float] | None = None
        self._refused: ModelError | UsageError | None = None
        self._scaled = False  # the loss is a multiple of what was read
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
            if weighing.when == "before" and replicas.replicas > 1:
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
    def is_read(self) -> bool:
        """Whether the loss itself said what it is, so that there is nothing to check."""
        return self.learns and not self._scaled and isinstance(self.measure, (Entries, type(SUM)))

    def saw(self, number: int, reading: LossReading | None) -> None:
        if reading is not None and reading.mean:
            self._divided[number] = reading.total
            self._scaled = self._scaled or bool(reading.factors)
        if self.measure is not None:
            return
        if reading is None:
            self._take(ROWS)
        elif not reading.mean:
            adds = all(is_constant(factor, self._batch, number) for factor in reading.factors)
            self._take(SUM if adds else ROWS)
        elif reading.total.item() == 0:  # all is ignored; others will tell what of
            self._empty.add(number)
        else:
            self._take(find_entries(reading, self._batch, number) or ROWS)

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

    def check(self) -> list[float]:
        shares = self()
        if not self._divided or self.measure is None:
            return shares
        totals = torch.stack(list(self._divided.values()))
        slack, divided = 8 * torch.finfo(totals.dtype).eps, dict(zip(self._divided, totals.tolist(), strict=True))
        weights = [1.0] * len(self._batch.args) if self.weights is None else self.weights
        most = max(divided, key=lambda number: divided[number])
        for number, total in divided.items():
            apart = abs(weights[number] * divided[most] - weights[most] * total)
            if self.weights is None or apart > slack * weights[most] * divided[most]:
                raise ModelError(
                    f"the losses of microbatches {number} and {most} are means over {total:g} and {divided[most]:g} "
                    f"entries, but count as {weights[number]:g} and {weights[most]:g}, by {self.measure}: neither the "
                    f"batch's loss nor its gradients would be those of the whole batch in one piece; {REMEDY}"
                )
        return shares


def is_constant(factor: Tensor, batch: Batch, number: int) -> bool:
    """Whether a factor is the number of tokens in the whole batch, as Hugging Face models are told it."""
    given = batch.kwargs[number].get(ITEMS)
    return given is not None and not factor.dim() and factor.item() == float(given)
