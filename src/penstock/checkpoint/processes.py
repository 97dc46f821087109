"""The processes that save one checkpoint together, and how they agree.

Where ranks are threads there is one. Else exchanges go over the pipeline's own transport, and then over the links to
the other axes of its mesh, so that on every way a process that died, stalls or is somewhere else is named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from penstock.errors import CheckpointError, UsageError
from penstock.parallel.group.agreement import agree
from penstock.runtime.messages.clock import CLOCK

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

Mine = TypeVar("Mine")


class Processes:
    """`number` of `count`; `call` is what the user called, which must be the same on all."""

    def __init__(self, pipe: Pipeline, call: str) -> None:
        deployment = getattr(pipe, "deployment", None)
        if deployment is None:
            raise UsageError(
                f"a {type(pipe).__name__} is not a penstock.Pipeline; build one from the model, or use `penstock "
                f"checkpoint export` for plain weights"
            )
        world = deployment.world
        if pipe.closed and world.transport is not None:
            raise UsageError(f"this pipeline is closed, and {call} needs its other processes: call it before close()")
        self._world = world
        self._call = call
        self._transport = world.transport
        self.clock = CLOCK if world.transport is None else world.transport.clock
        self._replication = deployment.replication
        if _has_other_axes(pipe):
            self.count, self.number = dist.get_world_size(), dist.get_rank()
        elif self._transport is not None:
            self.count, self.number = self._transport.ranks, self._transport.rank
        else:
            self.count, self.number = 1, 0

    @property
    def first(self) -> bool:
        return self.number == 0

    def exchange(self, value: Any) -> list[Any]:
        """Return every process's value, by its number; all must make the same call."""
        mine = self._world.all_gather(self._call, (self.number, value))
        pipelines = self._replication.all_gather(self._call, mine)
        answers = dict(each for pipeline in pipelines for each in pipeline)
        return [answers[number] for number in range(self.count)]

    def lost(self) -> Exception | None:
        """Return the loss of a peer, if one is known; from any thread."""
        lost: Exception | None = None if self._transport is None else self._transport.broken
        return self._replication.broken if lost is None else lost

    def on_all(self, work: Callable[[], tuple[Mine, Any]], path: Any = None) -> tuple[Mine, list[Any]]:
        """Do something on every process; what fails on one is an error on all.

        `work` returns (what stays here, what all get to know); the result is the former and everyone's latter.
        """
        kept: list[Mine] = []

        def find() -> Any:
            mine, shared = work()
            kept.append(mine)
            return shared

        def refuse(number: int, problem: str) -> CheckpointError:
            return CheckpointError(f"process {number}: {problem}", path=path)

        try:
            answers = agree(find, self.exchange, refuse=refuse)
        except OSError as error:
            raise CheckpointError(str(error), path=path) from error
        return kept[0], answers


def _has_other_axes(pipe: Pipeline) -> bool:
    """Return whether the pipeline's mesh is more than the pipeline's own axis; then it must have all processes."""
    mesh = pipe.composition.axes.mesh
    if mesh is None or mesh.size() == dist.get_world_size(pipe.deployment.world.group):
        return False
    if mesh.size() != dist.get_world_size():
        raise UsageError(
            f"the mesh has {mesh.size()} of {dist.get_world_size()} processes; a checkpoint is saved by a mesh of all "
            f"of them, or by a pipeline with group="
        )
    return True
