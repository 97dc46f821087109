"""A batch of the data to cut a model by, before Lightning has set up its loaders."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from penstock.errors import UsageError
from penstock.integrations.first_rows import first_rows

__all__ = ["example_batch", "rows_of"]


def example_batch(trainer: Trainer, rows: int) -> Any:
    """Return the first rows of what the trainer is about to run on; random numbers stay as they were."""
    loop: Any = trainer._active_loop
    loader: Any = loop._data_source.dataloader()
    while isinstance(loader, (list, tuple)) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"the model is cut with a batch of its data, and a {type(loader).__name__} cannot provide one; pass "
            f"PipelineStrategy(example=batch), with a batch as a step gets it"
        )
    return first_rows(loader.dataset, rows, loader.collate_fn)


def rows_of(batch: Any) -> int:
    """Return how many rows a batch has: its first tensor's."""
    return next((len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)
