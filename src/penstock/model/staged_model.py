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
    doubts = found.uneven([[stage] for stage in range(staged.stages)], by_parameters)
    schedule = schedule_for(staged.stages) if doubts else None
    if schedule is not None:
        doubts = found.uneven([schedule.placement.stages_of(rank) for rank in range(schedule.ranks)], by_parameters)
    empty = [stage for stage in range(staged.stages) if not found.on([stage])]
    if empty:
        doubts.append(f"no parameters are on {_named(empty)}; pass fewer stages, or other counts with balance=")
    model = staged.model
    named = model.named_parameters(remove_duplicate=False) if isinstance(model, nn.Module) else ()
    names = Counter(parameter for _, parameter in named)  # What has several names is meant to be in several places.
    for stages in sorted({tuple(each) for each in found.stages.values() if len(set(each)) > 1}):
        both = [each for each, places in found.stages.items() if tuple(places) == stages and names[each] < 2]
        size, _, words = found.describe(each for each in both if each.requires_grad)
        if size > NOTICED * found.total:
            doubts.append(
                f"{_named(stages)} each hold and train {words}, because the model's code uses them in several places "
                f"or reads them outside of modules that it calls; let one module own and use them, or cut where all "
                f"uses are on one stage"
            )
    return tuple(doubts)


class _Parameters:
    """The parameters of a model in stages, with their names and stages."""

    def __init__(self, staged: StagedModel) -> None:
        self.names: dict[nn.Parameter, str] = {}
        self.stages: dict[nn.Parameter, list[int]] = defaultdict(list)
        for holding in staged.holdings():
            for name, parameter in holding.module.named_parameters():
                self.names[parameter] = holding.names.get(name, name)
                self.stages[parameter].append(holding.stage)
        self.total = sum(parameter.numel() for parameter in self.names)

    def on(self, some: Collection[int]) -> list[nn.Parameter]:
        return [parameter for parameter, stages in self.stages.items() if not set(some).isdisjoint(stages)]

    def describe(self, some: Iterable[nn.Parameter]) -> tuple[int, int, str]:
        """Return the size of parameters, that of their largest layer, and in words their share and largest layers."""
        layers: Counter[str] = Counter()
        for parameter in some:
            layers[self.names[parameter].rpartition(".")[0] or self.names[parameter]] += parameter.numel()
        most = ", ".join(f"{layer} {size / self.total:.0%}" for layer, size in layers.most_common(3))
        more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
        words = f"{layers.total() / self.total:.0%} of the model's parameters ({most}{more})"
        return layers.total(), max(layers.values(), default=0), words

    def uneven(self, groups: Sequence[Collection[int]], by_parameters: bool) -> list[str]:
        limit = max(UNEVEN / len(groups), 0.0 if by_parameters else NEARLY_ALL) * self.total
        return [
            f"{_named(some)} {'has' if len(some) == 1 else 'have'} {words}, where {1 / len(groups):.0%} would be even; "
            f"name other places to cut with split_at=, or pass other weights with balance="
            for some in groups
            for size, largest, words in [self.describe(self.on(some))]
            if size - largest > limit
        ]


def _named(some: Collection[int]) -> str:
    return f"stage{'s' * (len(some) > 1)} {', '.join(map(str, some))}"
