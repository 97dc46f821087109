"""The table of stages that `Pipeline.describe` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from penstock.schedule import links, simulate

if TYPE_CHECKING:
    from penstock.model.balance.profile import Weight
    from penstock.model.part import StagePart
    from penstock.pipeline import Pipeline

__all__ = ["stage_table"]

NUMBERS = ("stage", "rank", "parameters", "trainable", "ms", "activation MB", "bytes out")  # aligned to the right


def stage_table(pipe: Pipeline) -> str:
    """Stages with their ranks, sizes and measured weights, the schedule with its price, and the links."""
    timeline = simulate(pipe.schedule)
    name = pipe.schedule.name or "own schedule"
    return "\n".join(
        [
            _table([_row(pipe, index) for index in range(pipe.deployment.split.stages)]),
            "",
            f"split     {pipe.deployment.split.how}",
            f"schedule  {name}: {pipe.schedule.ranks} ranks, {pipe.microbatches} microbatches; with equal stages "
            f"{timeline.bubble:.1%} idle, at most {max(timeline.peak_activations)} activations in flight on a rank",
            f"ranks     {pipe.deployment.world.kind}",
            *([f"beside    {pipe.composition}"] if str(pipe.composition) else []),
            *_links(pipe),
        ]
    )


def _table(rows: list[dict[str, str]]) -> str:
    """A column for each name that any row has something under."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = [
        "  ".join(
            row[name].rjust(widths[name]) if name in NUMBERS else row[name].ljust(widths[name]) for name in names
        ).rstrip()
        for row in [{name: name for name in names}, *rows]
    ]
    return "\n".join(lines)


def _row(pipe: Pipeline, index: int) -> dict[str, str]:
    part, topology = pipe.deployment.split.parts[index], pipe.deployment.split.topology
    parameters = list(part.module.parameters())
    feeds = [str(stage) for stage in topology.consumers(index)] or ["loss"]
    return {
        "stage": str(index),
        "rank": str(pipe.schedule.placement.rank_of(index)),
        "units": _units(part),
        "parameters": f"{sum(parameter.numel() for parameter in parameters):,}",
        "trainable": f"{sum(parameter.numel() for parameter in parameters if parameter.requires_grad):,}",
        **_measured(_weights(pipe, index), getattr(part, "bytes_out", None)),
        "reads from": " ".join(str(stage) for stage in topology.producers(index)) or "batch",
        "feeds": " ".join(feeds),
    }


def _units(part: StagePart) -> str:
    """How many, and the first and last by name: `3 (blocks.1 .. blocks.3)`."""
    names: list[str] | None = getattr(part, "units", None)
    if names is None and isinstance(part.module, nn.Sequential):
        names = list(part.module._modules)
    if names is None:
        return f"1 ({type(part.module).__name__})"
    if not names:
        return "0"
    ends = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
    return f"{len(names)} ({ends or type(part.module).__name__})"


def _weights(pipe: Pipeline, index: int) -> Sequence[Weight]:
    """What the pieces of the stage weigh, where that was looked at."""
    return pipe.deployment.split.weights_of(index)


def _measured(weights: Sequence[Weight], bytes_out: int | None) -> dict[str, str]:
    """Of one microbatch, as measured with the example; empty where nothing was.

    What a stage sends is what its last piece returned, unless the part itself knows better (skips).
    """
    time = sum(weight.milliseconds for weight in weights)
    known = any(weight.output_bytes for weight in weights)
    return {
        "ms": f"{time:.2f}" if time else "",
        "activation MB": f"{sum(weight.activation_bytes for weight in weights) / 1e6:.2f}" if known else "",
        "bytes out": f"{weights[-1].output_bytes if bytes_out is None else bytes_out:,}" if known else "",
    }


def _links(pipe: Pipeline) -> list[str]:
    """What each link between ranks uses, the links of one kind together."""
    found = links(pipe.schedule.placement, pipe.deployment.split.topology)
    ways = sorted({way for link in found for way in _both(link.source_rank, link.target_rank)})
    by_wire: dict[str, list[str]] = {}
    for source, target in ways:
        by_wire.setdefault(pipe.deployment.world.wire(source, target), []).append(f"{source} -> {target}")
    lines = [f"{', '.join(named)}: {wire}" for wire, named in by_wire.items()] or ["none"]
    return [f"{'links' if not number else '':10}{line}" for number, line in enumerate(lines)]


def _both(source: int, target: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (source, target), (target, source)
