"""The seam between a rank and the other copies of its stages.

A pipeline may be one of several that train the same model on batches of their own (replicas), each stage's
parameters may be spread over them (sharded), and each tensor over further ranks. What a rank does about that hangs
on a few moments of a step: the sharding actions of its program, the weight of its batch, the end. `Replication` is the
answer where there is nothing to do; `penstock.parallel` has its subclasses. The executor never asks which it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn

from penstock.errors import PeerFailure
from penstock.runtime.engine.report import EndedStep, ReplicaReport, StepReport
from penstock.runtime.optim.norms import norm_of
from penstock.schedule import Action, Schedule


class Replication:
    """What a rank does about copies of its stages; this base does nothing: one replica, whose stages are complete."""

    is_alone = True  # whether there is nothing to do around a step
    replicas = 1
    index = 0  # of this replica
    leads = True  # whether this rank's word counts for all of its copies, and for the other parts of its tensors
    replaced: Sequence[tuple[str, int, nn.Parameter]] = ()  # (name, stage) of parameters that parts stand for now
    overlaps = True  # whether a rank may begin its next step before the other ranks of its pipeline have ended this one
    sets_aside = False  # whether gradients of earlier steps are set aside in a step, and so not added to in place
    replica_reports: Sequence[ReplicaReport] = ()  # of the last step, of every replica, where there are several

    @property
    def broken(self) -> PeerFailure | None:
        """What has ended the connection to the copies, if something has."""
        return None

    def ready(self) -> None:
        """Before a training step, while ranks prepare: raises what would set the copies of a stage apart."""

    def act(self, action: Action) -> None:
        """UNSHARD, RESHARD or REDUCE_GRAD, in its turn."""

    def explain(self, error: BaseException) -> PeerFailure | None:
        """The loss of another rank that an error in a compute comes from, if it does."""
        return None

    def fail(self, failure: PeerFailure) -> None:
        """The step has failed here, and the rest of the program is drained: what other replicas wait for must come."""

    def drain(self, action: Action) -> None:
        """An action of a step that has failed: take part where other replicas would wait."""

    def total(self, weight: float) -> Callable[[], float]:
        """What the batches of all replicas weigh; may be asked for once other replicas had time to answer."""
        return lambda: weight

    def compare(self, value: Any) -> list[Any]:
        """What every replica says at this place of a step; all of them come by it."""
        return [value]

    @contextmanager
    def step(self, program: Schedule, training: bool) -> Iterator[Self]:
        """Around a step of this replica, which tells what came of it by `end`."""
        yield self

    def end(self, reports: Sequence[StepReport]) -> None:
        """The ranks are done: from here on the gradients, and `replica_reports`, are those of all replicas."""

    def meet(self, ended: EndedStep) -> None:
        """This rank is done with a step that the next one overlaps: its copies are done too, and its gradients are
        those of all replicas; or all its copies say that the step has failed.
        """

    def same_count(self, count: Callable[[], int]) -> int:
        """Into how many microbatches an evaluation goes here; an error of one replica is told to all."""
        return count()

    def lowered(self, program: Schedule) -> Schedule:
        """A program with this pipeline's sharding actions."""
        return program

    def part_of(self, value: Any, current: Any) -> Any:
        """What this rank takes of a whole tensor, to put into one that it may hold only a part of."""
        return value

    def whole(self, value: Any) -> Any:
        """All of a tensor that this rank may hold a part of; every rank with a part of it, or a copy, asks for it."""
        return value

    def first_has(self, value: torch.Tensor) -> torch.Tensor:
        """What the first replica has in the place of this tensor; all of them ask for it."""
        return value

    def loaded(self, values: Sequence[Any]) -> None:
        """These values of parameters were given to load_state_dict()."""

    def norm(
        self, gradients: Sequence[torch.Tensor], order: float, foreach: bool | None
    ) -> tuple[float, torch.dtype] | None:
        """The norm of these gradients of this rank, each counted once over all ranks that hold a part of it."""
        return norm_of(gradients, order, foreach)

    def all_gather(self, call: str, value: Any) -> list[Any]:
        """What every copy of this rank, and every rank with another part of what it holds, says in this call."""
        return [value]

    def close(self) -> None:
        """Give back what is held."""
