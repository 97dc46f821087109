"""One batch of a training run, and what the loop asks of whatever gives it batches."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

MARKED = 256  # numbers of a tensor that a batch's checksum reads


@dataclass(frozen=True)
class DataBatch:
    """What one pass is given: positional or keyword inputs, and the target."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    tokens: int  # The rate counts tokens where rows have them, else rows.

    def share(self, number: int, count: int) -> DataBatch:
        """Return the rows of replica `number` of `count`; `tokens` stay those of all."""
        return self if count == 1 else self.with_rows(lambda tensor: tensor.tensor_split(count)[number])

    def with_rows(self, change: Callable[[Tensor], Tensor]) -> DataBatch:
        """Return the batch in which each tensor with rows is what `change` makes of it."""
        return self._mapped(lambda tensor: change(tensor) if tensor.dim() else tensor)

    def pinned(self) -> DataBatch:
        """Copy it to memory from which an accelerator copies while the host continues."""
        return self._mapped(lambda each: each.pin_memory() if each.is_cpu and each.layout is torch.strided else each)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> DataBatch:
        args, kwargs, target = pytree.tree_map_only(Tensor, change, (self.args, self.kwargs, self.target))
        return DataBatch(args, kwargs, target, self.tokens)

    def mark(self, before: int = 0) -> int:
        """Compute a checksum of some of its numbers, by which processes notice that they have different batches."""
        for value in pytree.tree_leaves((self.args, self.kwargs, self.target)):
            if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
                some = value.detach().reshape(-1)[:: max(1, value.numel() // MARKED)].cpu().contiguous()
                before = zlib.crc32(bytes(some.view(torch.uint8).tolist()), before)
        return before


class DataBatches(Protocol):
    """What the loop trains on. `number` counts passes through the pipeline."""

    words: str

    def first(self) -> DataBatch:
        """Return a batch to look at, without taking it."""

    def at(self, number: int) -> DataBatch:
        """Return the batch of pass `number`."""

    def validation(self, number: int) -> DataBatch | None:
        """Return a batch to evaluate with; None where there are no (more) such."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what it is a position in."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
