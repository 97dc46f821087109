"""What a loss was divided by, read off its graph.

A cross-entropy may be anywhere: in a lambda, in a wrapper of the user's, in a Hugging Face model that takes `labels`.
Its node in the graph of the loss knows all that matters: whether it is a mean, over how much, and the very targets that
it saw. Found again among the tensors of the microbatch, these say how to weigh all microbatches before they have run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.runtime.batch.microbatch import Batch
from penstock.runtime.loss.weights import Entries, integers

NEGATIVE_LOG_LIKELIHOOD = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
SCALED = frozenset({"DivBackward0", "MulBackward0"})
ANOTHER_TYPE = "ToCopyBackward0"
SHIFTS = ("", "padded", "dropped")
ITEMS = "num_items_in_batch"
MEAN = 1  # torch's number for that reduction


class LossReading(NamedTuple):
    """A cross-entropy that a loss is, whether scaled or not."""

    node: Any
    factors: tuple[Tensor, ...]  # that it was multiplied with or divided by

    @property
    def mean(self) -> bool:
        """Else it is a sum."""
        return bool(self.node._saved_reduction == MEAN)

    @property
    def total(self) -> Tensor:
        """Over how much it is a mean."""
        total: Tensor = self.node._saved_total_weight
        return total.detach()


def read_loss(loss: Tensor) -> LossReading | None:
    """The cross-entropy at the root of a loss; None where that is something else, or there is no graph."""
    node: Any = loss.grad_fn
    factors: tuple[Tensor, ...] = ()
    while node is not None:
        name = node.name()
        if name in NEGATIVE_LOG_LIKELIHOOD:
            return LossReading(node, factors)
        if name in SCALED:
            (scaled, _), (by, _) = node.next_functions
            if scaled is None or by is not None:
                return None
            factors = (*factors, node._saved_other.detach())
        elif name != ANOTHER_TYPE:
            return None
        node = node.next_functions[0][0]
    return None


def find_entries(reading: LossReading, batch: Batch, number: int) -> Entries | None:
    """How the targets that a loss saw follow from what its microbatch was given, if they do."""
    node = reading.node
    seen, classes, ignored = node._saved_target.detach().reshape(-1), node._saved_weight, node._saved_ignore_index
    ignored -= 2**64 if ignored >= 2**63 else 0  # torch shows it without its sign
    alike: list[Entries] = []
    for place, value in integers(batch, number):
        if value.data_ptr() == seen.data_ptr() and value.numel() == seen.numel():
            return Entries(place, "", ignored, classes)  # it is the same memory
        for shift in SHIFTS if value.dim() > 1 else SHIFTS[:1]:
            found = Entries(place, shift, ignored, classes)
            moved = found.moved(value)
            if moved.numel() == seen.numel() and torch.equal(moved.reshape(-1).to(seen), seen):
                alike.append(found)
    return alike[0] if alike else None


def is_constant(factor: Tensor, batch: Batch, number: int) -> bool:
    """Whether a factor is the number of tokens in the whole batch, as Hugging Face models are told it."""
    given = batch.kwargs[number].get(ITEMS)
    return given is not None and not factor.dim() and factor.item() == float(given)
