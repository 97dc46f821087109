"""How batches become microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from penstock.rules import ArgumentRule, check_rules, choice, is_count
from penstock.runtime.batch.lengths import ByTokens
from penstock.runtime.state.batch_norm import BATCH_NORMS


def _is_dim(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_dim, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_dim, value))
    return value is None or is_count(value)


def _are_dims(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        (isinstance(label, str) or is_count(label)) and _is_dim(dim) for label, dim in value.items()
    )


RULES = {
    "split": ArgumentRule(
        lambda value: isinstance(value, ByTokens),
        "pass penstock.by_tokens(...), or leave it out to split batches by rows (how the model is cut is said by "
        "cut_options=)",
    ),
    "dims": ArgumentRule(_are_dims, "pass a dict of names or positions to a dimension or None, such as {'mask': 1}"),
    "order": choice("given", "size"),
    "inputs": choice("every", "first"),
    "batch_norm": choice(*BATCH_NORMS)._replace(or_none=True),
    "batch_norm_group": ArgumentRule(
        lambda value: isinstance(value, dist.ProcessGroup), "pass a process group of replicas"
    ),
}


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How batches are split into microbatches: `Pipeline(..., batch_options=BatchOptions(dims={"mask": 1}))`.

    Args:
        split: `by_tokens(...)` to split by length. By default, batches are split by rows.
        dims: The dimension of the rows where it is not 0, by the argument's name or position; `"target"` and
            `"output"` count as names. `None` as the dimension: every microbatch gets the whole value.
        order: `"given"`: microbatches run in their order. `"size"`: those of `by_tokens` run in an order made for the
            sizes of each batch; gradients are then summed in that order.
        inputs: `"every"`: all ranks are given the batch. `"first"`: only the rank of the first stage is.
        batch_norm: What batch norm layers see. `"microbatch"`: each microbatch, as torch does. `"deferred"`: running
            statistics follow whole batches. `"exact"`: they also normalise over whole batches. By default,
            `"microbatch"`, with a warning.
        batch_norm_group: With `"exact"`, the process group of replicas whose batches count as one.
    """

    split: ByTokens | None = None
    dims: Mapping[str | int, Any] = field(default_factory=dict)
    order: str = "given"
    inputs: str = "every"
    batch_norm: str | None = None
    batch_norm_group: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", {} if self.dims is None else self.dims)
        check_rules(vars(self), RULES, "BatchOptions")
