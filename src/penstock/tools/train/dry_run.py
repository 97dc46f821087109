"""A dry run: what would be trained, how it would be cut and scheduled, and what that is predicted to cost.

Everything is built for real, in this one process, and each piece of the model is run a few times to be measured; no
step is trained and nothing is written. Memory is predicted by kind, as the run itself reports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.devices import device_memory
from penstock.errors import PenstockError
from penstock.model.balance.profile import Weight
from penstock.model.cut import cut_model
from penstock.model.staged_model import Holding
from penstock.parallel.tensor_parallel.tensor_plan import plan_of
from penstock.pipeline import Pipeline
from penstock.schedule import Costs, Schedule, Timeline, simulate
from penstock.tools.train.build import build_model, build_pipeline, example_of
from penstock.tools.train.config.device import device_of, on_cpu, precision_of
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import libraries_of
from penstock.tools.train.data.batch import DataBatch, DataBatches
from penstock.tools.train.data.batches import check_validation, open_data
from penstock.tools.train.data.row_batches import RowBatches
from penstock.tools.train.data.vocabulary import check_vocabulary, position_warning
from penstock.tools.train.models.huggingface import left_out, tensor_plan_of
from penstock.tools.train.run.activations import measure_peaks
from penstock.tools.train.run.allocations import StepPeaks, bytes_of
from penstock.tools.train.run.baseline import code_of, process_bytes
from penstock.tools.train.run.memory import (
    COUNTED,
    Memory,
    exchanged_bytes,
    memory_table,
    optimizer_states,
    rank_memory,
)
from penstock.tools.train.updates.ema import averaged_as


@dataclass(frozen=True)
class DryRun:
    """What a dry run found out."""

    table: str
    data: str
    schedule: Schedule
    timeline: Timeline  # simulated with measured costs, or with equal ones where nothing could be measured
    measured: bool
    # By rank of a pipeline, or one of all that are threads; without activations where they could not be measured.
    memory: tuple[Memory, ...]
    notes: tuple[str, ...] = ()  # how the memory may differ from the run's
    on_device: bool = False  # whether the memory is that of an accelerator's devices
    limit: int | None = None  # bytes that one of these has, where it can be asked

    def text(self, width: int | None = None) -> str:
        lines = [self.table, f"data      {self.data}", "", self.schedule.draw(width=width), ""]
        idle = f"predicted idle share {self.timeline.bubble:.1%}"
        if self.measured:
            step = self.timeline.makespan / 1e3
            ranks = self.schedule.ranks
            idle += f"; one pass takes {step:.3g} s on {ranks} ranks with a core of this machine each"
        else:
            idle += ", with equal stages (the model could not be measured here)"
        lines.append(idle)
        peak = max(row.process for row in self.memory)
        if self.on_device:
            of = "" if self.limit is None else f" of the {self.limit / 1e6:,.0f} MB there are"
            lines.append(f"predicted memory, at most {peak / 1e6:,.0f} MB{of} on a device: its tensors")
            if self.limit is not None and peak > self.limit:
                lines.append(
                    "that does not fit: take more pipeline.ranks, more pipeline.microbatches or a smaller data.batch, "
                    'or set pipeline.recompute = "always"'
                )
        else:
            lines.append(
                f"predicted memory, at most {peak / 1e6:,.0f} MB in a process: its tensors, the copy that a checkpoint "
                f"is written from, and what Python and torch take by themselves"
            )
        lines += self.notes
        in_threads = len(self.memory) < self.schedule.ranks
        return "\n".join([*lines, "", memory_table(self.memory, ["all"] if in_threads else None)])


def make_plan(config: TrainConfig) -> DryRun:
    """Build the pipeline of a configuration, and measure its pieces, on the CPU."""
    on_device = device_of(config) is not None
    config = on_cpu(config)
    data = open_data(config)
    check_validation(config, data)
    batch = data.first().share(0, config.mesh.replicas)
    model, loss = build_model(config)
    check_vocabulary(config, model, data)
    pipe = build_pipeline(config, model, loss, batch, ranks=config.pipeline.ranks, transport="threads", values=_zeros)
    with pipe:
        table = pipe.describe().split("\n\n")[0]
        how = f"split     {pipe.deployment.staged.how}"
        stages = _measured(config, pipe, example_of(batch, config.pipeline.microbatches))
        schedule, split = pipe.schedule, pipe.deployment.staged
        counts = list(split.balance) if split.cuts else None
        largest = _second_step(config, data)
        peaks = None if stages is None else measure_peaks(config, schedule, counts, largest, _zeros)
        timeline = simulate(schedule)
        if stages is not None:
            times = [sum(weight.milliseconds for weight in weights) / 3 for weights in stages]
            timeline = simulate(schedule, Costs(forward=times, input=times, weight=times))
        memory = _memory(config, pipe, peaks, on_device)
        notes = tuple(memory_notes(config, data, largest))
        words = "\n".join(filter(None, [data.words, position_warning(model, data)]))
        return DryRun(
            f"{table}\n\n{how}",
            words,
            schedule,
            timeline,
            stages is not None,
            memory,
            notes,
            on_device,
            device_memory(),
        )


def _second_step(config: TrainConfig, data: DataBatches) -> DataBatch:
    """Return the largest batch of the step in which a run counts its activations."""
    passes = config.training.accumulate
    batches = [data.at(number) for number in range(passes * min(COUNTED, config.training.steps))]
    own = [batch.share(0, config.mesh.replicas) for batch in batches[-passes:]]
    return max(own, key=lambda batch: bytes_of(_tensors_in(batch)))


def memory_notes(config: TrainConfig, data: DataBatches, batch: DataBatch) -> Iterator[str]:
    """Describe how the memory that was predicted with `batch` may differ from the run's."""
    if config.mesh.tp > 1:
        yield (
            f"activations are an upper bound: tensors inside layers are divided by mesh.tp, {config.mesh.tp}; what "
            f"torch loads to divide them may add a fifth to a process"
        )
    if isinstance(data, RowBatches) and not config.data.packing:
        width = max(tensor.shape[1] for tensor in _tensors_in(batch) if tensor.dim() > 1)
        if width < data.longest:
            yield (
                f"activations are of rows of {width} tokens, the longest of the second step, as the run counts them; "
                f"with rows of {data.longest} there are more"
            )


def _tensors_in(batch: DataBatch) -> list[Tensor]:
    leaves = pytree.tree_leaves((batch.args, batch.kwargs, batch.target))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _zeros(name: str, tensor: Tensor) -> None:
    """Fill in zeros for weights that are in a folder: the shapes are the same."""
    tensor.zero_()


def _memory(config: TrainConfig, pipe: Pipeline, peaks: list[StepPeaks] | None, on_device: bool) -> tuple[Memory, ...]:
    """Predict the memory of each rank of one pipeline, the others being alike; threads of one process are one row.

    On devices, a rank has no more than its tensors there.
    """
    placement, ranks = pipe.schedule.placement, pipe.schedule.ranks
    divided = _divided(config, pipe)
    rows = []
    forked = config.pipeline.workers == "processes"
    base = 0.0 if on_device else process_bytes(libraries_of(config), _code_of(pipe), config, forked=forked)
    for rank in range(ranks):
        own = [each for each in pipe.deployment.staged.holdings() if placement.rank_of(each.stage) == rank]
        weights, trained, average = _weights(own, config, divided)
        state = trained * optimizer_states(config) + (0.0 if config.training.ema is None else average)
        sharded = config.mesh.replicate == "fsdp"
        exchanged = exchanged_bytes(weights, trained, config.mesh.replicas, sharded)
        active = together = None
        if peaks is not None:
            active, together = peaks[rank].activations + exchanged, peaks[rank].with_gradients + exchanged
        copy = 0.0
        if config.checkpoint.async_save and not on_device:  # On a device, the copy is in the memory of the host.
            copy = (trained if left_out(config) else weights) + state
        rows.append(rank_memory(weights, trained, state, active, alone=0.0, copy=copy, together=together))
    if config.pipeline.workers == "threads" and not on_device:
        rows = [_together(rows)]
    return tuple(replace(row, process=base + row.process) for row in rows)


def _code_of(pipe: Pipeline) -> list[str]:
    model = pipe.deployment.staged.model
    parts = [model] if isinstance(model, nn.Module) else model
    return code_of(module for part in parts for module in part.modules())


def _together(rows: list[Memory]) -> Memory:
    """Sum what several ranks in one process hold, at most."""
    columns = zip(*map(astuple, rows), strict=True)
    return Memory(*(None if None in column else sum(column) for column in columns))  # type: ignore[arg-type]


def _weights(own: list[Holding], config: TrainConfig, divided: set[str]) -> tuple[float, float, float]:
    """Count the bytes of weights and buffers in one process, of those that are trained, and of an average of these."""
    sharded = config.mesh.replicas if config.mesh.replicate == "fsdp" else 1
    weights = trained = average = 0.0
    seen: set[int] = set()
    for holding in own:
        for name, tensor in (*holding.module.named_parameters(), *holding.module.named_buffers()):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            size = float(tensor.numel() * tensor.element_size())
            if isinstance(tensor, nn.Parameter):
                size /= sharded * (config.mesh.tp if holding.names[name].rpartition(".")[0] in divided else 1)
                if tensor.requires_grad:
                    trained += size
                    average += size * averaged_as(tensor.dtype).itemsize / tensor.element_size()
            weights += size
    return weights, trained, average


def _divided(config: TrainConfig, pipe: Pipeline) -> set[str]:
    """Return the modules whose parameters mesh.tp processes share."""
    if config.mesh.tp == 1:
        return set()
    model = pipe.deployment.staged.model
    plan = plan_of(tensor_plan_of(config, model))
    names = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters(False))]
    return set() if plan is None else set(plan.resolve(names))


def _measured(config: TrainConfig, pipe: Pipeline, example: object) -> list[tuple[Weight, ...]] | None:
    """Measure the pieces of each stage, in time and memory; None for a model whose pieces cannot be run alone."""
    split = pipe.deployment.staged
    if split.weights and any(weight.milliseconds for weight in split.weights):
        return [split.weights_of(stage) for stage in range(split.stages)]
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = kinds.get(precision_of(config))
    try:
        with torch.autocast("cpu", dtype=dtype) if dtype is not None else nullcontext():
            found = cut_model(split.model, split.stages, balance="time", example=example)  # type: ignore[arg-type]
    except PenstockError:
        return None
    bounds = [0, *split.cuts, len(split.weights)]
    if len(found.weights) != bounds[-1]:
        return None
    return [tuple(found.weights[begin:end]) for begin, end in pairwise(bounds)]
