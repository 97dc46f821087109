"""The table of stages that `Pipeline.describe` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from penstock.schedule import links, simulate
from penstock.schedule.files.drawing import table

if TYPE_CHECKING:
    from penstock.model.balance.profile import Weight
    from penstock.model.part import StagePart
    from penstock.pipeline import Pipeline

NUMBERS = ("stage", "rank", "parameters", "trainable", "ms", "activation MB", "bytes out")  # aligned to the right


def stage_table(pipe: Pipeline) -> str:
    """Return stages with their ranks, sizes and measured weights, the schedule with its price, and the links."""
    timeline = simulate(pipe.schedule)
    name = pipe.schedule.name or "own schedule"
    return "\n".join(
        [
            _table([_row(pipe, index) for index in range(pipe.deployment.staged.stages)]),
            "",
            f"split     {pipe.deployment.staged.how}",
            f"schedule  {name}: {pipe.schedule.ranks} ranks, {pipe.microbatches} microbatches; with equal stages "
            f"{timeline.bubble:.1%} idle, at most {max(timeline.peak_activations)} activations in flight on a rank",
            f"ranks     {pipe.deployment.world.kind}",
            *([f"beside    {pipe.composition}"] if str(pipe.composition) else []),
            *_links(pipe),
        ]
    )


def _table(rows: list[dict[str, str]]) -> str:
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    left = [place for place, name in enumerate(names) if name not in NUMBERS]
    return table([names, *([row[name] for name in names] for row in rows)], left)


def _row(pipe: Pipeline, index: int) -> dict[str, str]:
    part, topology = pipe.deployment.staged.parts[index], pipe.deployment.staged.topology
    parameters = list(part.module.parameters())
    feeds = [str(stage) for stage in topology.consumers(index)] or ["loss"]
    return {
        "stage": str(index),
        "rank": str(pipe.schedule.placement.rank_of(index)),
        "units": _units(part, pipe.deployment.staged.balance[index]),
        "parameters": f"{sum(parameter.numel() for parameter in parameters):,}",
        "trainable": f"{sum(parameter.numel() for parameter in parameters if parameter.requires_grad):,}",
        **_measured(pipe.deployment.staged.weights_of(index)),
        "reads from": " ".join(str(stage) for stage in topology.producers(index)) or "batch",
        "feeds": " ".join(feeds),
    }


def _units(part: StagePart, count: int) -> str:
    """Name how many, as `balance=` counts them, and the first and last: `3 (blocks.1 .. blocks.3)`."""
    names: list[str] | None = getattr(part, "units", None)
    if names is None and isinstance(part.module, nn.Sequential):
        names = list(part.module._modules)
    if not names:
        return f"{count} ({type(part.module).__name__})"
    ends = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
    return f"{count} ({ends or type(part.module).__name__})"


def _measured(weights: Sequence[Weight]) -> dict[str, str]:
    time = sum(weight.milliseconds for weight in weights)
    known = any(weight.output_bytes for weight in weights)
    return {
        "ms": f"{time:.2f}" if time else "",
        "activation MB": f"{sum(weight.activation_bytes for weight in weights) / 1e6:.2f}" if known else "",
        "bytes out": f"{weights[-1].output_bytes:,}" if known else "",
    }


def _links(pipe: Pipeline) -> list[str]:
    """List what each link between ranks uses, the links of one kind together."""
    found = links(pipe.schedule.placement, pipe.deployment.staged.topology)
    pairs = {(link.source_rank, link.target_rank) for link in found}
    ways = sorted(pairs | {(target, source) for source, target in pairs})
    by_wire: dict[str, list[str]] = {}
    for source, target in ways:
        by_wire.setdefault(pipe.deployment.world.describe_link(source, target), []).append(f"{source} -> {target}")
    lines = [f"{', '.join(named)}: {wire}" for wire, named in by_wire.items()] or ["none"]
    return [f"{'links' if not number else '':10}{line}" for number, line in enumerate(lines)]
