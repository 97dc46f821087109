"""Elastic runs: the layouts that a run has when torchrun starts it again with fewer processes, and with all again.

The global batch, its order and the rows of each microbatch stay what they are, so that losses are those of the
undisturbed run up to rounding. Replicas are given up first: each rank then still holds what it held, and runs more
microbatches. With fewer ranks, each holds more of the model: the same stages where the schedule's family has room for
them, which keeps the random numbers too; else, unless the configuration fixes them, as many stages as the family has
by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.errors import UsageError
from penstock.schedule import family
from penstock.tools.train.config.consistent import check_consistent, is_schedule_file, processes_of, stages_of
from penstock.tools.train.config.settings import PipelineOptions, TrainConfig


def layout_for(config: TrainConfig, processes: int) -> TrainConfig:
    """Lay the configuration out for as many of these processes as have a layout; the others stand by.

    UsageError with the numbers that work, if there are too few or more than the full layout has.
    """
    found = elastic_layouts(config)
    fitting = [count for count in found if count <= processes]
    if not fitting or processes > processes_of(config):
        raise UsageError(
            f"launch.elastic: {processes} processes have no layout of {config.pipeline.ranks} ranks x "
            f"{config.mesh.replicas} replicas or fewer; these numbers have one: {describe_layouts(config)}. Set "
            f"torchrun's --nnodes=MIN:MAX and --nproc-per-node so that there are never fewer or more"
        )
    return found[max(fitting)]


def elastic_layouts(config: TrainConfig) -> dict[int, TrainConfig]:
    """Return the layouts that a run can have, by their number of processes, the full one first.

    Of several with the same number, the one with the most ranks.
    """
    found = {processes_of(config): config}
    for ranks in range(config.pipeline.ranks, 0, -1):
        for replicas in range(config.mesh.replicas, 0, -1):
            for smaller in _smaller(config, ranks, replicas):
                found.setdefault(processes_of(smaller), smaller)
    return dict(sorted(found.items(), reverse=True))


def describe_layouts(config: TrainConfig) -> str:
    """Describe the layouts of an elastic run."""
    return ", ".join(f"{count} ({describe_layout(layout)})" for count, layout in elastic_layouts(config).items())


def describe_layout(config: TrainConfig) -> str:
    """Describe the processes of a run."""
    ranks, replicas, tp = config.pipeline.ranks, config.mesh.replicas, config.mesh.tp
    parts = [_count(ranks, "rank")]
    parts += [_count(replicas, "replica")] if replicas > 1 else []
    parts += [f"tp {tp}"] if tp > 1 else []
    pieces = [_count(stages_of(config), "stage"), _count(config.pipeline.microbatches, "microbatch", "es")]
    return ", ".join([" x ".join(parts), *pieces])


def _count(number: int, what: str, many: str = "s") -> str:
    return f"{number} {what}{many if number > 1 else ''}"


def _smaller(config: TrainConfig, ranks: int, replicas: int) -> Iterator[TrainConfig]:
    """Yield the configuration with so many ranks and replicas, if it can be trained."""
    pipeline = replace(config.pipeline, ranks=ranks)
    if ranks < config.pipeline.ranks:
        if is_schedule_file(pipeline.schedule):
            return
        pipeline = replace(pipeline, stages=_stages(config, ranks))
    if not is_schedule_file(pipeline.schedule):  # rounded up: a microbatch never has more rows than before
        pipeline = replace(pipeline, microbatches=-(-pipeline.microbatches * config.mesh.replicas // replicas))
    smaller = replace(
        config,
        pipeline=pipeline,
        mesh=replace(config.mesh, replicas=replicas),
        logging=replace(config.logging, ranks=[]),  # torchrun has a filter of its own
    )
    try:
        check_consistent(smaller)
    except UsageError:
        return
    if _has_room(pipeline, stages_of(smaller)):
        yield smaller


def _stages(config: TrainConfig, ranks: int) -> int | None:
    """Return the stages for fewer ranks: as many as before, or None for what the schedule's family has by itself."""
    before, pipeline = stages_of(config), config.pipeline
    is_fixed = pipeline.stages is not None or isinstance(pipeline.balance, list) or bool(pipeline.split_at)
    same = before % ranks == 0 and _has_room(replace(pipeline, ranks=ranks), before)
    return before if same or is_fixed else None


def _has_room(pipeline: PipelineOptions, stages: int) -> bool:
    """Return whether the schedule's family places so many stages on these ranks: a V has two on each."""
    if is_schedule_file(pipeline.schedule):
        return True
    return family(pipeline.schedule).layout != "v" or stages == 2 * pipeline.ranks
