"""Doubts about a cut: stages that nobody would ask for, and which the user would otherwise only see in the memory.

A cut is as good as the pieces that it was made of. Where a model's code leaves fewer or larger pieces than its author
thinks, training is exact, and slow: one stage computes nearly everything, or several hold the same layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import nn

from penstock.model.staged_model import StagedModel

UNEVEN = 1.5  # times a fair share, beside its largest layer, is more than an even cut leaves on a stage
NEARLY_ALL = 0.9  # where it is not parameters that are balanced: few models have so many of them in a part of the time
NOTICED = 0.25  # of the parameters


def doubts_about(staged: StagedModel, by_parameters: bool) -> tuple[str, ...]:
    """Return what is odd about a cut that was not made by the user, a sentence each.

    Args:
        staged: The model in stages.
        by_parameters: Whether parameters are what the cut should even out.
    """
    sizes: dict[int, int] = {}
    names: dict[int, str] = {}
    trained: set[int] = set()
    stages_of: dict[int, list[int]] = defaultdict(list)
    for holding in staged.holdings():
        for name, parameter in holding.module.named_parameters():
            own = id(parameter)
            sizes[own], names[own] = parameter.numel(), holding.names.get(name, name)
            trained.update([own] if parameter.requires_grad else [])
            stages_of[own].append(holding.stage)
    total = sum(sizes.values())
    if not total or staged.stages < 2:
        return ()

    def share(of: Iterable[int]) -> str:
        return f"{sum(sizes[own] for own in of) / total:.0%}"

    def layers(of: Iterable[int]) -> list[tuple[str, int]]:
        found: dict[str, int] = defaultdict(int)
        for own in of:
            found[names[own].rpartition(".")[0] or names[own]] += sizes[own]
        return sorted(found.items(), key=lambda layer: -layer[1]) or [("", 0)]

    def largest(of: Iterable[int]) -> str:
        found = layers(of)
        most = ", ".join(f"{layer} {size / total:.0%}" for layer, size in found[:3])
        return most + (f" and {len(found) - 3} more" if len(found) > 3 else "")

    held = [[own for own, stages in stages_of.items() if stage in stages] for stage in range(staged.stages)]
    limit = max(UNEVEN / staged.stages, 0.0 if by_parameters else NEARLY_ALL) * total
    doubts = [
        f"stage {stage} has {share(of)} of the model's parameters ({largest(of)}), where {1 / staged.stages:.0%} would "
        f"be even; name other places to cut with split_at=, or pass other weights with balance="
        for stage, of in enumerate(held)
        if sum(sizes[own] for own in of) - layers(of)[0][1] > limit
    ]
    empty = [str(stage) for stage, of in enumerate(held) if not of]
    if empty:
        doubts.append(
            f"no parameters are on stage{'s' * (len(empty) > 1)} {', '.join(empty)}; pass fewer stages, or other "
            f"counts with balance="
        )
    tied = _tied(staged.model)
    for stages in sorted({tuple(found) for found in stages_of.values() if len(set(found)) > 1}):
        both = [own for own, found in stages_of.items() if tuple(found) == stages and own in trained - tied]
        if sum(sizes[own] for own in both) > NOTICED * total:
            doubts.append(
                f"stages {', '.join(map(str, stages))} each hold and train {share(both)} of the model's parameters "
                f"({largest(both)}), because the model's code uses them in several places or reads them outside of "
                f"modules that it calls; let one module own and use them, or cut where all uses are on one stage"
            )
    return tuple(doubts)


def _tied(model: object) -> set[int]:
    """Return the parameters that the model itself has under several names, which are meant to be in several places."""
    if not isinstance(model, nn.Module):
        return set()
    places: dict[int, int] = defaultdict(int)
    for _, parameter in model.named_parameters(remove_duplicate=False):
        places[id(parameter)] += 1
    return {own for own, count in places.items() if count > 1}
