"""A model cut into stages, as the rest of the package sees it: a part per stage, and which stage feeds which.

Whatever way a model is cut, the result is one `StagedModel`: a `StagePart` for each stage and the topology of the
values that cross. A part is called with what arrived from each producing stage and answers with what each consuming
stage gets; the runtime never looks inside.

A cut is as good as the pieces that it was made of. Where a model's code leaves fewer or larger pieces than its author
thinks, training is exact, and slow: one stage computes nearly everything, or several hold the same layers.
`doubts_about` finds what the user would otherwise only see in the memory.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from penstock.errors import CutWarning, FallbackWarning
from penstock.model.part import StagePart
from penstock.schedule.schedule import Schedule
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

    doubts: tuple[str, ...] = ()  # what is odd about the stages, a sentence each

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
        return len(self.parts)

    def holdings(self) -> list[Holding]:
        """Return all that the stages hold, in their order, and then the loss."""
        found = [Holding(part.index, part.module, part.names) for part in self.parts]
        return found if self.loss is None else [*found, self.loss]

    def weights_of(self, stage: int) -> tuple[Any, ...]:
        bounds = [0, *self.cuts, len(self.weights)]
        return self.weights[bounds[stage] : bounds[stage + 1]] if self.weights else ()


UNEVEN = 1.5  # times a fair share, beside its largest layer, is more than an even cut leaves on a stage
# Used where it is not parameters that are balanced: few models have so many of them in a part of the time.
NEARLY_ALL = 0.9
NOTICED = 0.25  # Share of the parameters.


def doubts_about(
    staged: StagedModel, by_parameters: bool, schedule_for: Callable[[int], Schedule | None] = lambda stages: None
) -> tuple[str, ...]:
    """Return what is odd about a cut that was not made by the user, a sentence each.

    Args:
        staged: The model in stages.
        by_parameters: Whether parameters are what the cut should even out.
        schedule_for: Returns the schedule of so many stages, if it is known: the stages of a rank count together.
    """
    found = _Parameters(staged)
    if not found.total or staged.stages < 2:
        return ()
    doubts = _uneven(found, [[stage] for stage in range(staged.stages)], by_parameters)
    schedule = schedule_for(staged.stages) if doubts else None
    if schedule is not None:
        ranks = [schedule.placement.stages_of(rank) for rank in range(schedule.ranks)]
        doubts = _uneven(found, ranks, by_parameters)
    empty = [stage for stage in range(staged.stages) if not found.held([stage])]
    if empty:
        doubts.append(f"no parameters are on {_stages(empty)}; pass fewer stages, or other counts with balance=")
    tied = _tied(staged.model)
    for stages in sorted({tuple(each) for each in found.stages_of.values() if len(set(each)) > 1}):
        both = [own for own, each in found.stages_of.items() if tuple(each) == stages and own in found.trained - tied]
        if found.size(both) > NOTICED * found.total:
            doubts.append(
                f"{_stages(stages)} each hold and train {found.share(both)} of the model's parameters "
                f"({found.largest(both)}), because the model's code uses them in several places or reads them outside "
                f"of modules that it calls; let one module own and use them, or cut where all uses are on one stage"
            )
    return tuple(doubts)


class _Parameters:
    """The parameters of a model in stages, each by its id."""

    def __init__(self, staged: StagedModel) -> None:
        self.sizes: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.trained: set[int] = set()
        self.stages_of: dict[int, list[int]] = defaultdict(list)
        for holding in staged.holdings():
            for name, parameter in holding.module.named_parameters():
                own = id(parameter)
                self.sizes[own], self.names[own] = parameter.numel(), holding.names.get(name, name)
                self.trained.update([own] if parameter.requires_grad else [])
                self.stages_of[own].append(holding.stage)
        self.total = sum(self.sizes.values())

    def held(self, some: Collection[int]) -> list[int]:
        return [own for own, stages in self.stages_of.items() if not set(some).isdisjoint(stages)]

    def size(self, of: Iterable[int]) -> int:
        return sum(self.sizes[own] for own in of)

    def share(self, of: Iterable[int]) -> str:
        return f"{self.size(of) / self.total:.0%}"

    def layers(self, of: Iterable[int]) -> list[tuple[str, int]]:
        """Return the layers that have these parameters, with their sizes, the largest first."""
        found: dict[str, int] = defaultdict(int)
        for own in of:
            found[self.names[own].rpartition(".")[0] or self.names[own]] += self.sizes[own]
        return sorted(found.items(), key=lambda layer: -layer[1]) or [("", 0)]

    def largest(self, of: Iterable[int]) -> str:
        found = self.layers(of)
        most = ", ".join(f"{layer} {size / self.total:.0%}" for layer, size in found[:3])
        return most + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _uneven(found: _Parameters, groups: Sequence[Collection[int]], by_parameters: bool) -> list[str]:
    limit = max(UNEVEN / len(groups), 0.0 if by_parameters else NEARLY_ALL) * found.total
    return [
        f"{_stages(some)} {'has' if len(some) == 1 else 'have'} {found.share(of)} of the model's parameters "
        f"({found.largest(of)}), where {1 / len(groups):.0%} would be even; name other places to cut with split_at=, "
        f"or pass other weights with balance="
        for some in groups
        for of in [found.held(some)]
        if found.size(of) - found.layers(of)[0][1] > limit
    ]


def _stages(some: Collection[int]) -> str:
    return f"stage{'s' * (len(some) > 1)} {', '.join(map(str, some))}"


def _tied(model: object) -> set[int]:
    """Return the parameters that the model itself has under several names, which are meant to be in several places."""
    named = model.named_parameters(remove_duplicate=False) if isinstance(model, nn.Module) else ()
    return {own for own, count in Counter(id(parameter) for _, parameter in named).items() if count > 1}
