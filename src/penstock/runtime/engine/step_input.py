"""What one rank is given for a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock.runtime.batch.comparison import Readers
from penstock.runtime.batch.fingerprint import FingerprintedBatch
from penstock.runtime.batch.microbatch import Batch
from penstock.runtime.loss.check import StepCheck
from penstock.runtime.loss.shares import Shares


@dataclass
class StepInput:
    """What one step works on, on one rank."""

    batch: Batch
    shares: Shares  # of each microbatch in the batch's loss
    loss_fn: Callable[..., Any] | None = None
    join: Callable[[list[Any]], Any] | None = None  # makes one of all outputs; without it, they are not kept
    reduce: Callable[..., Any] | None = None  # what is kept of each output; gets the microbatch's loss_kwargs
    training: bool = True
    scale: float = 1.0  # of the gradients, for float16
    recompute: frozenset[int] = frozenset()  # microbatches whose forward runs again in the backward
    recompute_stages: frozenset[int] = frozenset()  # stages for which all do
    batch_dims: Mapping[str | int, Any] = field(default_factory=dict)  # where the rows of the batch's tensors are
    attached: bool = False  # the output goes back to the user's graph: there is no loss here
    output_gradients: list[list[Tensor | None]] = field(default_factory=list)  # that came from there, by microbatch
    begin_check: Callable[[], StepCheck | None] | None = None  # of the loss, where one may be needed
    replicas: int = 1  # that work on a batch each
    steps: int | None = None  # that this rank has completed
    fingerprinted: FingerprintedBatch | None = None  # where ranks compare what they were given
    readers: Readers | None = None  # which ranks need an argument, where each brings its own


@dataclass(frozen=True)
class Refused:
    """In the place of the step's input of every local rank: why none can be run, for all ranks to hear."""

    error: BaseException

    def __getitem__(self, rank: int) -> Refused:
        return self
