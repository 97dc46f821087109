"""A dry run: what would be trained, how it would be cut and scheduled, and what that is predicted to cost.

Everything is built for real, in this one process, and each piece of the model is run a few times to be measured; no
step is trained and nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import PenstockError
from penstock.model.balance.profile import Weight
from penstock.model.cut import cut_model
from penstock.pipeline import Pipeline
from penstock.schedule import Costs, Schedule, Timeline, simulate
from penstock.train.build import build_model, build_pipeline, example_of
from penstock.train.config.settings import TrainConfig
from penstock.train.data.batches import open_data
from penstock.train.data.vocabulary import check_vocabulary


@dataclass(frozen=True)
class DryRun:
    """What a dry run found out."""

    table: str
    data: str
    schedule: Schedule
    timeline: Timeline  # simulated with measured costs, or with equal ones where nothing could be measured
    measured: bool
    memory: tuple[float, ...]  # bytes by rank: weights, gradients, optimizer and activations; empty where not measured

    def text(self, width: int | None = None) -> str:
        lines = [self.table, f"data      {self.data}", "", self.schedule.draw(width=width), ""]
        idle = f"predicted idle share {self.timeline.bubble:.1%}"
        if not self.measured:
            return "\n".join([*lines, f"{idle}, with equal stages (the model could not be measured here)"])
        step = self.timeline.makespan / 1e3
        lines.append(
            f"{idle}; one pass takes {step:.3g} s on {self.schedule.ranks} ranks with a core of this machine each"
        )
        peak = max(self.memory)
        lines.append(
            f"predicted peak memory {_megabytes(peak)}, on rank {self.memory.index(peak)}: weights, gradients, "
            f"optimizer and activations"
        )
        lines.append("by rank   " + "  ".join(_megabytes(held) for held in self.memory))
        return "\n".join(lines)


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.{0 if count >= 1e8 else 1}f} MB"


def make_plan(config: TrainConfig) -> DryRun:
    """Build the pipeline of a configuration, and measure its pieces."""
    data = open_data(config)
    batch = data.first().share(0, config.mesh.replicas)
    model, loss = build_model(config)
    check_vocabulary(config, model, data)
    pipe = build_pipeline(config, model, loss, batch, ranks=config.pipeline.ranks, transport="threads")
    with pipe:
        table = pipe.describe().split("\n\n")[0]
        how = f"split     {pipe.deployment.split.how}"
        stages = _measured(config, pipe, example_of(batch, config.pipeline.microbatches))
        schedule = pipe.schedule
        if stages is None:
            return DryRun(f"{table}\n\n{how}", data.words, schedule, simulate(schedule), False, ())
        times = [sum(weight.milliseconds for weight in weights) / 3 for weights in stages]
        kept = [float(sum(weight.activation_bytes for weight in weights)) for weights in stages]
        timeline = simulate(schedule, Costs(forward=times, input=times, weight=times, activation=kept))
        memory = list(timeline.peak_memory)
        parts = config.mesh.replicas if config.mesh.replicate == "fsdp" else 1
        for stage, weights in enumerate(stages):
            memory[schedule.placement.rank_of(stage)] += sum(weight.state_bytes for weight in weights) / parts
        return DryRun(f"{table}\n\n{how}", data.words, schedule, timeline, True, tuple(memory))


def _measured(config: TrainConfig, pipe: Pipeline, example: object) -> list[tuple[Weight, ...]] | None:
    """What the pieces of each stage take, in time and memory; None for a model whose pieces cannot be run alone."""
    if pipe.deployment.split.weights and any(weight.milliseconds for weight in pipe.deployment.split.weights):
        return [pipe.deployment.split.weights_of(stage) for stage in range(pipe.deployment.split.stages)]
    model, _ = build_model(config)
    try:
        found = cut_model(model, pipe.deployment.split.stages, balance="time", example=example)  # type: ignore[arg-type]
    except PenstockError:
        return None
    bounds = [0, *pipe.deployment.split.cuts, len(pipe.deployment.split.weights)]
    if len(found.weights) != bounds[-1]:
        return None
    return [tuple(found.weights[begin:end]) for begin, end in pairwise(bounds)]
