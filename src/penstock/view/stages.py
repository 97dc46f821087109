"""The table of stages that `Pipeline.describe` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.schedule import links, simulate

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

__all__ = ["stage_table"]

HEAD = ("stage", "rank", "layers", "parameters", "trainable", "reads from", "feeds")


def stage_table(pipe: Pipeline) -> str:
    """Stages with their ranks and sizes, the schedule with its price, and the links."""
    rows = [HEAD, *(_row(pipe, index) for index in range(pipe.split.stages))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    table = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    timeline = simulate(pipe.schedule)
    name = pipe.schedule.name or "own schedule"
    return "\n".join(
        [
            table,
            "",
            f"split     {pipe.split.how}",
            f"schedule  {name}: {pipe.schedule.ranks} ranks, {pipe.microbatches} microbatches; with equal stages "
            f"{timeline.bubble:.1%} idle, at most {max(timeline.peak_activations)} activations in flight on a rank",
            f"ranks     {pipe.world.kind}",
            *_links(pipe),
        ]
    )


def _row(pipe: Pipeline, index: int) -> tuple[str, ...]:
    part, topology = pipe.split.parts[index], pipe.split.topology
    parameters = list(part.module.parameters())
    layers = len(list(part.module.children())) or 1
    feeds = [str(stage) for stage in topology.consumers(index)] or ["loss"]
    return (
        str(index),
        str(pipe.schedule.placement.rank_of(index)),
        f"{layers} ({type(part.module).__name__})",
        f"{sum(parameter.numel() for parameter in parameters):,}",
        f"{sum(parameter.numel() for parameter in parameters if parameter.requires_grad):,}",
        " ".join(str(stage) for stage in topology.producers(index)) or "batch",
        " ".join(feeds),
    )


def _links(pipe: Pipeline) -> list[str]:
    found = links(pipe.schedule.placement, pipe.split.topology)
    ways = sorted({(link.source_rank, link.target_rank) for link in found})
    text = ", ".join(f"{source} -> {target}" for source, target in ways)
    return [f"links     {text or 'none'}: {pipe.world.wire}"]
