"""What a user's own handler of an action sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.runtime.batch.microbatch import Batch
from penstock.schedule import Action, Op, Schedule

if TYPE_CHECKING:
    from penstock.runtime.engine.executor import Executor


class Context:
    """What your own handler is given: the step's data, and the default ways to run an action.

    `fetch(action)` waits for what a compute needs. `compute(action)` then runs it, which is also safe on another thread
    or stream beside the other half of an overlapped pair. `run(action)` is the default for any action.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    @property
    def rank(self) -> int:
        """The rank that the handler runs on."""
        return self._executor.rank

    @property
    def stages(self) -> Mapping[int, torch.nn.Module]:
        """The modules of this rank's stages, by stage."""
        return {index: stage.module for index, stage in self._executor.stages.items()}

    @property
    def batch(self) -> Batch:
        """Arguments, keyword arguments and targets of each microbatch."""
        return self._executor.computations.step_input.batch

    @property
    def losses(self) -> Mapping[int, Tensor]:
        """The losses so far, by microbatch, on the rank of the last stage."""
        return self._executor.computations.losses

    @property
    def schedule(self) -> Schedule:
        """The program that runs: the schedule with its transfers."""
        program = self._executor.program
        assert program is not None, "a handler is called in a step"
        return program

    @property
    def sends(self) -> tuple[tuple[int, int], ...]:
        """Sends under way: (channel, microbatch), oldest first in each channel.

        Their memory is still read, and must not be written to. Where a send copies at once, as between processes of
        one host, there are none.
        """
        return tuple(self._executor.mailbox.ends.under_way)

    @property
    def transfers(self) -> tuple[tuple[int, int], ...]:
        """Receives under way: (channel, microbatch), oldest first."""
        return tuple(self._executor.mailbox.ends.pending)

    def fetch(self, action: Action) -> None:
        """Wait until everything that the computes of `action` need is on this rank.

        Args:
            action: The action, or an overlapped pair.
        """
        for part in action.parts():
            if part.op in (Op.F, Op.B, Op.I):
                self._executor.mailbox.fetch("F" if part.op is Op.F else "B", part.stage, part.microbatch)

    def compute(self, action: Action) -> None:
        """Run the computes of `action`, in order.

        Args:
            action: The action, or an overlapped pair.
        """
        for part in action.parts():
            self._executor.run_default(part)
            self._executor.run_by_handlers.add(part)

    def run(self, action: Action) -> None:
        """Run any action in the default way.

        Args:
            action: The action.
        """
        self._executor.run_default(action)
        own = self._executor.handlers if action.op.is_pair else ()  # a half's own handler is asked for that half
        self._executor.run_by_handlers.update(part for part in action.parts() if part.op not in own)


Handler = Callable[[Action, Context], None]
