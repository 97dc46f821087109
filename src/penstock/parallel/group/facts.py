"""What the ranks of a pipeline must have been given alike, so that a difference is an error and not a hang."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from penstock.model.staged_model import StagedModel
from penstock.schedule import Schedule


def facts_of(schedule: Schedule, split: StagedModel, settings: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return what must be the same on every rank: each in words, and a digest of all of it."""
    facts: dict[str, tuple[str, Any]] = {
        "microbatches": (str(schedule.microbatches), None),
        "schedule": (
            f"{schedule.name or 'its own'} for {schedule.stages} stages",
            (schedule.rows, sorted(schedule.recompute)),
        ),
        **{name: (words, None) for name, words in settings.items()},
    }
    for number, holding in enumerate(split.holdings()):
        place = f"stage {number}" if number < split.stages else "loss_fn"
        shapes = [
            (holding.names.get(name, name), tuple(value.shape))
            for name, value in holding.module.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)  # A module may have state of another kind.
        ]
        numbers = sum(math.prod(shape) for _, shape in shapes)
        facts[place] = (f"{len(shapes)} tensors with {numbers} numbers", shapes)
        own = dict(holding.module.named_parameters())
        dtypes = {name: str(value.dtype).removeprefix("torch.") for name, value in own.items()}
        trained = [name for name, value in own.items() if value.requires_grad]
        facts[f"{place}, dtypes"] = (", ".join(sorted(set(dtypes.values()))), dtypes)
        facts[f"{place}, trained"] = (f"{len(trained)} of {len(own)} parameters", trained)
    return {name: (words, _digest(value)) for name, (words, value) in facts.items()}


def compared(answers: Sequence[Mapping[str, tuple[str, str]]], word: str) -> str:
    """List what differs from the first one's facts, in lines; empty where nothing does."""
    return "\n  ".join(
        f"{name}: {word} {number} has {theirs.get(name, ('nothing', ''))[0]}, {word} 0 has {fact[0]}"
        for name, fact in answers[0].items()
        for number, theirs in enumerate(answers)
        if theirs.get(name) != fact
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
