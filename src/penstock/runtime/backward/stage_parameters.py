"""What a stage knows about its parameters: which of them can wait for `W`."""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)  # what may be taken apart: a subclass of Tensor may want to see each operation


class StageParameters:
    """Which parameters of a stage can wait for `W`: those that no operation uses but those that wait. One per stage."""

    def __init__(self) -> None:
        self.deferrable: dict[int, tuple[weakref.ref[Tensor], bool]] = {}  # by id: whether every use of it can wait
        self.differentiates = False  # the stage's forward takes gradients itself: nothing of it is deferred

    @property
    def known(self) -> bool:
        """Whether a first microbatch has shown its graph."""
        return bool(self.deferrable)

    def remember(self, parameter: Tensor, every_use_waits: bool) -> None:
        """For as long as the parameter lives."""
        key = id(parameter)
        self.deferrable[key] = (weakref.ref(parameter, partial(_forget, weakref.ref(self), key)), every_use_waits)


def _forget(parameters: weakref.ref[StageParameters], key: int, _: weakref.ref[Tensor]) -> None:
    if (found := parameters()) is not None:
        found.deferrable.pop(key, None)
