"""Batches of a trainer: steps that add up to one, their microbatches, and the first rows, to cut a model by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader

from penstock.checkpoint.generators import restore_generators, states_of_generators
from penstock.pipeline import Pipeline
from penstock.runtime.batch.microbatch import count_for


class AccumulationScale:
    """What the loss of a step is multiplied by, where several steps make one batch; goes to `pipe.state.scaler`."""

    scale = 1.0

    def loss_scale(self) -> float:
        return self.scale

    def check_unscaled(self, call: str) -> None:
        """Check that gradients are as they should be: this scale is part of the loss."""


def take_count(
    pipe: Pipeline, most: int, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, target: Any = None
) -> int:
    """Let the next step run in at most as many microbatches as its batch has rows: the last one may have few."""
    own = count_for(most, args, kwargs or {}, target, {})
    count: int = pipe.deployment.replication.same_count(lambda: own or most)
    pipe.deployment.programs.take(count)
    return count


def first_rows(dataset: Any, rows: int, collate: Callable[[Any], Any]) -> Any:
    """Collate the first rows to a batch; random numbers stay as they were."""
    before = states_of_generators()
    batch = next(iter(DataLoader(dataset, batch_size=rows, collate_fn=collate)))
    restore_generators(before)
    return batch
