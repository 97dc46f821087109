"""What the user asked for of the balance, joined with what there is to balance.

A cut needs three things that no single layer has: what the pieces weigh (model), which rank will
have which stage and how much it holds at a time (schedule), and, on processes, one opinion
about measured times (runtime). They come together here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from penstock.errors import ModelError, UsageError
from penstock.model.balance.partition import in_flight, partition
from penstock.model.balance.profile import WAYS, Agree, Weight, piece_weights
from penstock.schedule.schedule import Schedule

SLACK = 0.02  # measured times within this share of each other count as equal


def _no_schedule(stages: int) -> Schedule | None:
    return None


@dataclass(frozen=True)
class Balancing:
    """`how` is None, counts, "parameters" | "time" | "memory", or a mapping of names to weights."""

    how: str | Sequence[int] | Mapping[str, float] | None = None
    speeds: Sequence[float] | None = None
    optimizer: str = "adamw"
    schedule_for: Callable[[int], Schedule | None] = _no_schedule
    agree: Agree | None = None
    measures: bool = True  # whether this rank's times are the ones that count
    # Pieces are measured there; None: where they are.
    device: torch.device | None = None
    # Called instead of finding the best cut.
    search: Callable[[int, Sequence[Weight], Sequence[int] | None], list[int]] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.how, str) and self.how not in WAYS:
            choices = ", ".join(map(repr, WAYS))
            raise UsageError(f"balance={self.how!r}: choose one of {choices}, counts, or {{name: weight}}")

    @property
    def counts(self) -> list[int] | None:
        if self.how is None or isinstance(self.how, (str, Mapping)):
            return None
        return list(self.how)

    @property
    def runs(self) -> bool:
        """Whether the pieces have to be run to know what they weigh."""
        return self.how in ("time", "memory")

    @property
    def profiling(self) -> dict[str, Any]:
        """How pieces are weighed for it: options of `profile_layers` and `profile_calls`."""
        agree = self.agree if self.runs else None
        measured = self.runs and self.measures
        return {"optimizer": self.optimizer, "measured": measured, "agree": agree, "device": self.device}

    def cuts(
        self, stages: int, weights: Sequence[Weight], allowed: Sequence[int] | None, crossing: Sequence[float] | None
    ) -> list[int]:
        """Return the first pieces of stages 1, 2, ...; by parameters where nothing was asked for."""
        if self.search is not None and self.how == "time":
            return self.search(stages, weights, allowed)
        schedule = self.schedule_for(stages)
        how: Any = "parameters" if self.how is None else self.how
        held = in_flight(schedule) if schedule is not None and how == "memory" else ()
        found = partition(
            piece_weights(how, weights, held),
            stages,
            allowed=allowed,
            crossing=crossing,
            placement=None if schedule is None else schedule.placement,
            speeds=self.speeds,
            slack=SLACK if how == "time" else 0.0,
        )
        return list(found.cuts)


def stage_count(stages: int | None, counts: Sequence[int] | None, split_at: Sequence[str]) -> int:
    """Return how many stages were asked for, in whichever way; refuse names that make another number."""
    if split_at and stages not in (None, len(split_at) + 1):
        raise ModelError(f"split_at has {len(split_at)} names, which make {len(split_at) + 1} stages, not {stages}")
    if stages is not None:
        return stages
    return len(split_at) + 1 if split_at or counts is None else len(counts)


def first_pieces(counts: Sequence[int], stages: int, pieces: int, has: str) -> list[int]:
    """Return the pieces with which stages 1, 2, ... begin, by `balance=[counts]`; `has` describes what a model has of
    them.
    """
    if sum(counts) != pieces or len(counts) != stages or min(counts) < 1:
        raise ModelError(
            f"balance={list(counts)} has {len(counts)} entries and sums to {sum(counts)}, but the model is to have "
            f"{stages} stages and {has}; each needs a stage"
        )
    return list(accumulate(counts))[:-1]
