"""A moving average of the weights, kept beside them on every rank.

Each process averages the parameters that it owns, shard by shard where they are sharded, so the average is that of one
process whatever the layout. It is changed after each optimizer step, evaluated with, and saved under the parameters'
own names, so that a checkpoint gives it back in another layout too. Buffers and frozen parameters are not averaged.

The decay of update n, counted from 0, is min(decay, (1 + n) / (10 + n)): the first weights, which are far from where
training goes, are soon forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.checkpoint.named_tensors import names_by_parameter
from penstock.pipeline import Pipeline


class WeightAverage:
    """The average of this process's trained parameters; `tensors` has it by parameter name."""

    def __init__(self, pipe: Pipeline, decay: float) -> None:
        names = names_by_parameter(pipe)
        owned = [parameter for parameter in pipe.parameters() if parameter is not pipe.state.nothing]
        self._parameters = {names[id(parameter)]: parameter for parameter in owned if parameter.requires_grad}
        # A copy is laid out as its parameter is.
        self.tensors = {
            name: each.detach().clone().to(averaged_as(each.dtype)) for name, each in self._parameters.items()
        }
        self.decay = decay
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of a step into the average."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        averages = [_here(self.tensors[name]) for name in self._parameters]
        if averages:
            weights = [
                _here(each).to(average.dtype) for each, average in zip(self._parameters.values(), averages, strict=True)
            ]
            torch._foreach_lerp_(averages, weights, 1 - decay)

    @torch.no_grad()
    def begin(self, loaded: Collection[str]) -> None:
        """Begin averages that a loaded checkpoint did not have at the weights that it had."""
        for name, parameter in self._parameters.items():
            if name not in loaded:
                _here(self.tensors[name]).copy_(_here(parameter))

    @torch.no_grad()
    def write(self) -> None:
        """Put the average into the parameters, for good."""
        for name, parameter in self._parameters.items():
            _here(parameter).copy_(_here(self.tensors[name]))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the parameters the average's values inside the `with` block; afterwards their own, to the bit."""
        kept = {name: _here(parameter).detach().clone() for name, parameter in self._parameters.items()}
        self.write()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    _here(parameter).copy_(kept[name])


def averaged_as(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an average of such weights: 32 bits at least, because less would swallow small changes."""
    return torch.promote_types(dtype, torch.float32)


def _here(tensor: Tensor) -> Tensor:
    """Return the tensor, or the part of it that this process has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
