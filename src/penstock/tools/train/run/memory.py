"""What a run holds in memory, by kind: weights, gradients, optimizer, activations, and the process as a whole.

The first three are counted on the tensors themselves. Activations live within the passes of a step: what comes and goes
in them, the messages of other ranks included, is activations and what computing needs, and the most at any moment is
counted (`allocations`). Gradients come while activations go, so the most of all tensors may be less than the sum of the
kinds; it is counted as well. (On an accelerator, its allocator counts; activations are then the most of all, without
the gradients.) A dry run predicts the same numbers (`activations`). Ranks that are threads of one process take turns as
the system likes, so there are no such numbers for them.
The process is what the system says is resident: Python and torch alone are some hundred megabytes of it.

A dry run and a plan find out the parts of the account in their own ways, and add them up by `rank_memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.devices import on_accelerator
from penstock.model.balance.profile import OPTIMIZERS
from penstock.schedule.files.drawing import table
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.run.allocations import Allocations, StepPeaks, bytes_of, counted_step
from penstock.tools.train.run.progress import memory_now

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from penstock.pipeline import Pipeline
    from penstock.tools.train.updates.ema import WeightAverage

COUNTED = 2  # the step of a start in which activations are counted: in the first, the loss is checked as well
KINDS = ("weights", "gradients", "optimizer", "activations")  # Kinds of tensors.


@dataclass(frozen=True)
class Memory:
    """Bytes of one process, or of one rank where that is predicted."""

    weights: float
    gradients: float
    optimizer: float  # The optimizer's state, and the average of the weights where one is kept.
    activations: float | None  # None where they could not be measured, or a run had no second step
    tensors: float | None  # the most of all these at one time; None as above
    process: float


def memory_table(rows: Sequence[Memory], ranks: Sequence[Any] | None = None) -> str:
    """Draw one line per rank, or per process where that is all of them, in megabytes."""
    numbers = map(str, range(len(rows)) if ranks is None else ranks)
    lines = [[number, *map(_megabytes, astuple(row))] for number, row in zip(numbers, rows, strict=True)]
    return table([["rank", *(field.name for field in fields(Memory))], *lines])


def memory_document(rows: Sequence[Memory]) -> list[dict[str, Any]]:
    """Return the same for a file, in bytes."""
    return [asdict(row) for row in rows]


def _megabytes(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.{0 if count >= 1e8 else 1}f} MB"


class MemoryWatch:
    """Looks at the steps of a process at the beginning of its run."""

    def __init__(self, pipe: Pipeline, optimizer: Optimizer, average: WeightAverage | None = None) -> None:
        self._pipe, self._optimizer, self._average = pipe, optimizer, average
        self._parameters = list(pipe.parameters())
        self._is_one_rank = len(pipe.deployment.ranks.executors) == 1
        self._steps = 0
        self._passes = ExitStack()
        self._gradients = 0
        self._peaks: StepPeaks | None = None
        self._held: int | None = None  # Bytes on a device as the counted step began.
        device = next(iter(pipe.deployment.devices.values()), None)
        self._device = device if on_accelerator(device) else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch a training step inside the `with` block."""
        self._steps += 1
        with self._passes:
            if self._steps == COUNTED and self._is_one_rank:
                if self._device is not None:
                    torch.accelerator.reset_peak_memory_stats(self._device)
                    self._held = torch.accelerator.memory_allocated(self._device)
                elif Allocations.can_count():
                    self._peaks = self._passes.enter_context(counted_step(self._pipe))
            yield

    def see_gradients(self) -> None:
        """Count gradients in a step, when all are there."""
        self._passes.close()  # what the optimizer needs for a moment is no activation
        self._gradients = max(self._gradients, bytes_of(parameter.grad for parameter in self._parameters))
        if self._held is not None:
            most = float(torch.accelerator.max_memory_allocated(self._device) - self._held)
            self._peaks, self._held = StepPeaks(max(0.0, most - self._gradients), most), None

    def memory(self) -> Memory:
        """Return what there is now, and was at most."""
        state = [value for each in self._optimizer.state.values() for value in each.values()]
        state += [] if self._average is None else self._average.tensors.values()
        modules = [holding.module for holding in self._pipe.deployment.holdings()]
        weights = bytes_of(each for module in modules for each in (*module.parameters(), *module.buffers()))
        kept = bytes_of(value for value in state if isinstance(value, Tensor))
        peaks = self._peaks
        active, together = (None, None) if peaks is None else (peaks.activations, peaks.with_gradients)
        tensors = None if together is None else weights + kept + together
        return Memory(weights, self._gradients, kept, active, tensors, memory_now())


def optimizer_states(config: TrainConfig) -> float:
    """Return how often as many bytes as the trained parameters the optimizer keeps."""
    if config.optimizer.name == "adamw8bit":
        return OPTIMIZERS["adamw"] / 4  # a byte for four
    momentum = config.optimizer.name == "sgd" and config.optimizer.momentum
    return OPTIMIZERS["sgd-momentum" if momentum else config.optimizer.name]


def exchanged_bytes(weights: float, trained: float, replicas: int, sharded: bool) -> float:
    """Count what replicas need in a step besides: a copy of the gradients, or whole weights and gradients of shards."""
    if replicas == 1:
        return 0.0
    return (weights + trained) * replicas if sharded else trained


def rank_memory(
    weights: float,
    gradients: float,
    optimizer: float,
    activations: float | None,
    *,
    alone: float,
    copy: float,
    together: float | None = None,
) -> Memory:
    """Add up the memory of a rank, by kind.

    `alone` is what its process takes without a model, and `copy` what a checkpoint is written from. `together` is the
    most that gradients and activations take at one time, where that is known: without accumulation, gradients come
    with the first backwards, when a rank may hold fewer activations already.
    """
    passing = gradients + (activations or 0.0) if together is None else together
    tensors = weights + optimizer + passing
    known = None if activations is None else tensors
    return Memory(weights, gradients, optimizer, activations, known, alone + tensors + copy)
