"""What a training step has logged, of its microbatches, as numbers of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.integrations.lightning.example import rows_of
from penstock.pipeline import StepResult

__all__ = ["joined_logs", "number_of"]

Number = tuple[float, str, dict[str, Any]]  # a value, the name of its dtype, and the options of log()


def number_of(value: Any, options: dict[str, Any]) -> Number:
    """A logged value as it goes to the other ranks."""
    dtype = value.dtype if isinstance(value, Tensor) else torch.get_default_dtype()
    return float(value), str(dtype).removeprefix("torch."), options


def joined_logs(result: StepResult, batch: Any, count: int) -> dict[str, Number]:
    """By name, what was logged of the whole batch.

    The loss is the batch's own; any other number is the mean over microbatches, each by its rows.
    """
    losses = [float(each) for each in result.losses]
    rows = [len(piece) for piece in torch.arange(rows_of(batch)).tensor_split(count)]
    found = {}
    for name, (value, options) in result.output["logged"].items():
        each_value = value if isinstance(value, list) else [value] * count
        values = [float(each) for each in each_value]
        if values == losses and result.loss is not None:
            number = float(result.loss)
        else:
            number = sum(each * size for each, size in zip(values, rows, strict=True)) / sum(rows)
        sizes = options.get("batch_size")
        if sizes is not None:
            options = {**options, "batch_size": sum(sizes) if isinstance(sizes, list) else sizes * count}
        found[name] = (number, *number_of(each_value[0], options)[1:])
    return found
