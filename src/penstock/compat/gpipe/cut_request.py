"""Where a GPipe's model is to be cut: what was asked for, and the cuts that follow from it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from penstock.errors import ModelError, UsageError
from penstock.model.balance.request import Balancing
from penstock.model.by_position import more_than_its_layers
from penstock.model.cut import Example, cut_model
from penstock.model.cut_options import CutOptions
from penstock.model.staged_model import StagedModel
from penstock.schedule import build

Balance = Sequence[int] | int | str | Mapping[str, float] | None
MOST_BY_ITSELF = 8  # stages on a CPU where nothing says how many


@dataclass(frozen=True)
class CutRequest:
    """`stages` is None where neither it nor `balance`, `split_at` or `devices` says how many there shall be."""

    stages: int | None
    how: Any  # counts, "parameters", "time", "memory" or weights by name; None where `split_at` says it
    split_at: tuple[str, ...]

    @classmethod
    def of(
        cls, stages: int | None, balance: Balance, split_at: Sequence[str] | None, devices: Sequence[Any] | None
    ) -> Self:
        """Make a request from what a GPipe is given."""
        counts = list(balance) if isinstance(balance, Sequence) and not isinstance(balance, str) else None
        how: Any = balance if counts is None else counts
        if balance is None or isinstance(balance, int):
            how = None if split_at else "parameters"
        Balancing(how)  # It refuses what it does not know.
        counts_by_name = {
            "stages": stages,
            "balance": balance if isinstance(balance, int) else None if counts is None else len(counts),
            "split_at": len(split_at) + 1 if split_at else None,
            "devices": None if devices is None else len(devices),
        }
        given = {name: value for name, value in counts_by_name.items() if value is not None}
        if len(set(given.values())) > 1:
            words = ", ".join(f"{name}= says {value}" for name, value in given.items())
            raise UsageError(f"how many stages? {words}; leave all but one out, or make them agree")
        return cls(next(iter(given.values()), None), how, tuple(split_at or ()))

    def by_position(self, model: nn.Module) -> bool:
        """Return whether the cuts are between layers of an `nn.Sequential`."""
        if not isinstance(model, nn.Sequential) or more_than_its_layers(model):
            return False
        return set(self.split_at) <= set(model._modules)

    def needs_batch(self, model: nn.Module) -> bool:
        """Return whether a batch has to be looked at."""
        return not self.by_position(model) or not (isinstance(self.how, list) or self.how in (None, "parameters"))

    def with_counts(self, counts: list[int] | None) -> Self:
        """Return the same request with the layers per stage that were found, if any were."""
        return replace(self, how=counts, split_at=()) if counts else self

    def cut(self, model: nn.Module, chunks: int, example: Example | None) -> StagedModel:
        """Cut the model into stages."""
        by_position = self.by_position(model)
        stages = self.stages or _stages_by_itself(model)
        balancing = Balancing(self.how, schedule_for=lambda count: build("gpipe", count, chunks))
        fewest = stages if self.stages or by_position else 1
        # Nothing says how many: take as many as there can be.
        for count in range(stages, fewest, -1):
            with suppress(ModelError):
                return cut_model(model, count, balance=balancing, example=example)
        return cut_model(model, fewest, balance=balancing, example=example, split_at=self.split_at)


def cut_another_path(model: nn.Module, split: StagedModel, example: Example) -> StagedModel:
    """Cut the stages for a batch that takes another path through a model which was cut as `split`.

    Layers stay on the stages that they have, as far as the path goes: `layers[:depth]` may end before the last stage.
    """
    names = [piece.name for piece in split.weights]
    starts = [f"{names[cut]}#{names[: cut + 1].count(names[cut])}" for cut in split.cuts]
    options = CutOptions(method="replay")
    for count in range(len(starts), 0, -1):
        with suppress(ModelError):
            return cut_model(model, None, example=example, split_at=starts[:count], options=options)
    return cut_model(model, 1, example=example, options=options)


def _stages_by_itself(model: nn.Module) -> int:
    """Return how many stages to make where nothing says so: one for each GPU, or for each core there is."""
    many = torch.accelerator.device_count() or min(len(os.sched_getaffinity(0)), MOST_BY_ITSELF)
    return max(1, min(many, len(model) if isinstance(model, nn.Sequential) else many))
