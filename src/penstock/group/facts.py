"""What the ranks of a pipeline must have been given alike, so that a difference is an error and not a hang."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from penstock.runtime.batch.feed import Feed

__all__ = ["compared", "facts_of"]


def facts_of(pipe: Feed) -> dict[str, tuple[str, str]]:
    """What must be the same on every rank: each in words, and a digest of all of it."""
    schedule = pipe.schedule
    facts: dict[str, tuple[str, Any]] = {
        "microbatches": (str(schedule.microbatches), None),
        "schedule": (
            f"{schedule.name or 'its own'} for {schedule.stages} stages",
            (schedule.rows, sorted(schedule.recompute)),
        ),
        "recompute": (pipe.recompute, None),
        "precision": (str(pipe.crew.precision or "the caller's"), None),
        "batch_norm": (pipe.batch_norm, None),
        "inputs": (pipe.inputs, None),
        "atomic": (str(pipe.atomic), None),
        "split of batches": (str(pipe.batching or "by rows"), None),
        "transport": (pipe.world.way or "no choice", None),
        "timeout": (str(pipe.world.timeout), None),
        "loss_reduction": (str(pipe.loss_reduction), None),
        "loss_per_microbatch": (str(pipe.loss_per_microbatch), None),
        "loss_weight": ("none" if pipe.loss_weight is None else "one", None),
        "batch_dims": (str(pipe.batch_dims), None),
    }
    for number, holding in enumerate(pipe.split.holdings()):
        place = f"stage {number}" if number < pipe.split.stages else "loss_fn"
        shapes = [
            (holding.names.get(name, name), tuple(value.shape))
            for name, value in holding.module.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)  # and no state of another kind
        ]
        numbers = sum(math.prod(shape) for _, shape in shapes)
        facts[place] = (f"{len(shapes)} tensors with {numbers} numbers", shapes)
        own = dict(holding.module.named_parameters())
        dtypes = {name: str(value.dtype).removeprefix("torch.") for name, value in own.items()}
        trained = [name for name, value in own.items() if value.requires_grad]
        facts[f"{place}, dtypes"] = (", ".join(sorted(set(dtypes.values()))), dtypes)
        facts[f"{place}, trained"] = (f"{len(trained)} of {len(own)} parameters", trained)
    return {name: (words, _digest(value)) for name, (words, value) in facts.items()}


def compared(told: Sequence[Mapping[str, tuple[str, str]]], word: str) -> str:
    """What differs from the first one's facts, in lines; empty where nothing does."""
    return "\n  ".join(
        f"{name}: {word} {number} has {theirs.get(name, ('nothing', ''))[0]}, {word} 0 has {fact[0]}"
        for name, fact in told[0].items()
        for number, theirs in enumerate(told)
        if theirs.get(name) != fact
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
