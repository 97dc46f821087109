"""The first rows of a dataset, to cut a model by before its trainer has set up the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from penstock.checkpoint.generators import restore_generators, states_of_generators

__all__ = ["first_rows"]


def first_rows(dataset: Any, rows: int, collate: Callable[[Any], Any]) -> Any:
    """Collate the first rows to a batch; random numbers stay as they were."""
    before = states_of_generators()
    batch = next(iter(DataLoader(dataset, batch_size=rows, collate_fn=collate)))
    restore_generators(before)
    return batch
