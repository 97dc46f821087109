"""A model cut into stages, as the rest of the package sees it: a part per stage, and which stage feeds which.

Whatever way a model is cut, the result is one `StagedModel`: a `StagePart` for each stage and the topology of the
values that cross. A part is called with what arrived from each producing stage and answers with what each consuming
stage gets; the runtime never looks inside.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from penstock.errors import CutWarning, FallbackWarning
from penstock.model.part import StagePart
from penstock.schedule.topology import Topology


@dataclass(frozen=True)
class Holding:
    """A module that a stage holds, and what names its parameters, buffers and other state have in the whole model."""

    stage: int
    module: nn.Module
    names: Mapping[str, str]


@dataclass(frozen=True)
class StagedModel:
    """A model in parts, one per stage, and the topology of what crosses."""

    parts: tuple[StagePart, ...]
    topology: Topology
    how: str  # one sentence for the user: in which way it was cut
    model: Any = None  # what was cut: a module, or a list of stage modules
    # Other names of tied parameters -> the model's own.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # Names in the model's state that are of no part -> a part's name.
    repeated: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[Any, ...] = ()  # what each piece weighs, where that is known
    balance: tuple[int, ...] = ()  # the layers or units that each stage has, counted as `balance=` counts them
    cuts: tuple[int, ...] = ()  # the pieces with which stages 1, 2, ... begin
    allowed: tuple[int, ...] = ()  # the pieces with which a stage may begin; none: any
    recut: Callable[[Sequence[int]], StagedModel] | None = None  # the same model, cut before these pieces
    loss: Holding | None = None  # what the loss function holds, beside the last stage
    # Names in the model's state, where their order is not that of the parts.
    order: tuple[str, ...] = ()
    # Configurations of a model of transformers or with peft's adapters.
    origin: Mapping[str, Any] | None = None
    fallback: str = ""  # why it is this way, where another that comes first has refused the model

    doubts: tuple[str, ...] = ()  # what is odd about the stages, a sentence each (`stage_shares.py`)

    def warn(self) -> None:
        """Warn that a fallback was taken, and why, and of stages that are odd."""
        for doubt in self.doubts:
            warnings.warn(f"{type(self.model).__name__}: {doubt}", CutWarning, stacklevel=3)
        if self.fallback:
            warnings.warn(
                f"{type(self.model).__name__} is trained from its torch.export graph, which was checked against the "
                f"model, because replaying its own forward is not possible ({self.fallback}). Pass cut_options="
                f"CutOptions(method='graph') if "
                f"that is what you want, or method='replay' for an error instead",
                FallbackWarning,
                stacklevel=3,
            )

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.parts)

    def holdings(self) -> list[Holding]:
        """Return all that the stages hold, in their order, and then the loss."""
        found = [Holding(part.index, part.module, part.names) for part in self.parts]
        return found if self.loss is None else [*found, self.loss]

    def weights_of(self, stage: int) -> tuple[Any, ...]:
        """Return what the pieces of one stage weigh, where that is known."""
        bounds = [0, *self.cuts, len(self.weights)]
        return self.weights[bounds[stage] : bounds[stage + 1]] if self.weights else ()
