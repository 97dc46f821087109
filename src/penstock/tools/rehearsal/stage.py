"""A stage that takes its stated time and computes on a number in the place of tensors.

The number is a function of everything that it came from: of its stage, step and microbatch, and of the numbers that
arrived. A message that is lost, doubled or swapped without being noticed would change the losses and gradients at the
end, which are compared with those of a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.part import OUTPUT
from penstock.runtime.backward.saved_graph import SavedGraph
from penstock.runtime.engine.stage import Forward, Stage, StageInput
from penstock.schedule import Op, Topology

Spend = Callable[[Op, int, int], None]  # a computation of a stage on a microbatch takes its time

_LOSSES = 1 << 20  # losses are whole numbers below this, whose sums floating point has exactly


class RehearsedStage(Stage):
    """One stage; `spend` makes time pass."""

    def __init__(self, index: int, topology: Topology, spend: Spend) -> None:
        # not that of a Stage, which is about modules and their parameters
        self.index = index
        self.producers, self.consumers = topology.producers(index), topology.consumers(index)
        self.is_last = index == topology.stages - 1
        self.module = nn.Identity()
        self.saved: dict[int, SavedGraph] = {}  # whole batches, which there are none of
        self.gathering = False
        self.gradient = 0  # the sum over microbatches, in this step
        self.step = 0
        self._spend = spend
        self._outputs: dict[int, int] = {}  # Kept between forward and backward.
        self._deferred: dict[int, int] = {}  # Kept between I and W.

    def begin_step(self, microbatches: int) -> None:
        self.gradient = 0

    def clear(self) -> None:
        self._outputs.clear()
        self._deferred.clear()

    def infer(self, given: StageInput, graph: bool = False) -> Forward:
        emitted = self.forward(given)
        del self._outputs[given.microbatch]
        return emitted

    def forward(self, given: StageInput) -> Forward:
        microbatch = given.microbatch
        self._spend(Op.F, self.index, microbatch)
        arrived = given.arrived
        output = output_of(self.step, self.index, microbatch, [arrived[producer] for producer in self.producers])
        self._outputs[microbatch] = output
        emitted = dict.fromkeys(self.consumers, output)
        if not self.is_last:
            return emitted, None, []
        emitted[OUTPUT] = output
        return emitted, None if given.loss_of is None else given.loss_of(output), []

    def backward(
        self,
        microbatch: int,
        gradients: Mapping[int, Any],
        *,
        split_backward: bool,
        loss_seed: Tensor | None,
        extra_seed: Tensor | None,
    ) -> dict[int, Any]:
        self._spend(Op.I if split_backward else Op.B, self.index, microbatch)
        gradient = gradient_of(self._outputs.pop(microbatch), [gradients[consumer] for consumer in self.consumers])
        if split_backward:
            self._deferred[microbatch] = gradient
        else:
            self.gradient += gradient
        return dict.fromkeys(self.producers, gradient)

    def weight_gradients(self, microbatch: int) -> None:
        self._spend(Op.W, self.index, microbatch)
        self.gradient += self._deferred.pop(microbatch)


def output_of(step: int, stage: int, microbatch: int, arrived: Sequence[int]) -> int:
    """Return what a stage makes of what has arrived."""
    return hash((step, stage, microbatch, *arrived))


def gradient_of(output: int, gradients: Sequence[int]) -> int:
    """Return what a stage makes of the gradients of its output."""
    return hash((output, *gradients))


def loss_of(output: int, target: object = None) -> Tensor:
    """Return the loss of a microbatch."""
    return torch.tensor(float(output % _LOSSES), dtype=torch.float64, device="cpu")


def plain_loop(topology: Topology, microbatches: int, step: int, training: bool) -> tuple[list[float], list[int]]:
    """Return the losses of all microbatches and the gradients of all stages, computed without a pipeline."""
    losses, sums = [], [0] * topology.stages
    producers = [topology.producers(stage) for stage in range(topology.stages)]
    consumers = [topology.consumers(stage) for stage in range(topology.stages)]
    for microbatch in range(microbatches):
        outputs: list[int] = []
        for stage in range(topology.stages):
            outputs.append(output_of(step, stage, microbatch, [outputs[producer] for producer in producers[stage]]))
        losses.append(float(outputs[-1] % _LOSSES))
        gradients: dict[int, int] = {}
        for stage in reversed(range(topology.stages)) if training else ():
            gradients[stage] = gradient_of(outputs[stage], [gradients[consumer] for consumer in consumers[stage]])
            sums[stage] += gradients[stage]
    return losses, sums
