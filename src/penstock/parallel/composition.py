"""What a pipeline was asked to be composed with, before anything is built.

Apart from what builds it, because that loads torch's DTensor and FSDP, which takes as long as torch itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import PeerFailure, UsageError
from penstock.model.original.wrappers import FSDP, wrappings
from penstock.model.part import StagePart
from penstock.parallel.axis_link import AxisLink
from penstock.parallel.group.world import check_built
from penstock.parallel.mesh import Axes
from penstock.parallel.parallel_options import ParallelOptions
from penstock.parallel.tensor_parallel.tensor_plan import plan_of
from penstock.runtime.engine.replication import Replication
from penstock.runtime.transport.distributed.transport import DistributedTransport
from penstock.schedule import Schedule, insert_reductions, insert_shards, lower
from penstock.schedule.seen import passes_seen

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

BESIDE = {"dp": "replica", "tp": "shard"}  # the axes beside the pipeline's own, and what their members are called
WINDOW = 2  # stages of a rank that are whole at a time: the one that computes, and the next


class Composition:
    """The mesh and the options of a pipeline, and the answers that follow from them."""

    def __init__(self, mesh: Any, options: ParallelOptions) -> None:
        replicate = options.replicate
        self.axes = Axes.of(mesh, replicate)
        if replicate is None and self.axes.size("dp") > 1:
            replicate = "ddp"
        self.replicate = replicate
        self.wrapped: frozenset[str] = frozenset()  # how the user has wrapped stages, if so
        self.window = WINDOW if options.window is None else options.window
        self.precision = options.shard_precision
        self.plan = plan_of(options.tensor_plan)
        if self.plan is not None and (self.axes.mesh is None or "tp" not in self.axes.mesh.mesh_dim_names):
            raise UsageError(
                "ParallelOptions(tensor_plan=) spreads tensors over an axis 'tp': pass mesh=penstock.mesh(pp=2, tp=2)"
            )

    def look_at(self, parts: Sequence[StagePart]) -> None:
        """See whether the user has wrapped stages for data parallelism, or spread them over tp."""
        for part in parts:
            found = wrappings(part.module)
            if found and self.replicate is not None:
                raise UsageError(
                    f"stage {part.index} is wrapped in {' and '.join(sorted(found))}, and ParallelOptions or the "
                    f"mesh's axis 'dp' ask the pipeline to do that; pass the plain module, or leave the axis "
                    f"out of mesh="
                )
            self.wrapped |= found
        if self.plan is None and self.axes.size("tp") > 1:
            from penstock.parallel.tensor_parallel.spread import is_spread  # loads DTensor

            if not any(is_spread(part.module) for part in parts):
                raise UsageError(
                    f"the mesh has tp={self.axes.size('tp')}, but no ParallelOptions(tensor_plan=) says what to "
                    f"spread over it, and no module is spread already, by parallelize_module() say; pass a plan, such "
                    f"as 'llama', or a mesh with tp=1"
                )

    @property
    def shards(self) -> bool:
        """Whether FSDP has the parameters: over several replicas, or for its precision where there is one."""
        return self.replicate == "fsdp" and (self.axes.size("dp") > 1 or self.precision is not None)

    def __str__(self) -> str:
        """Describe what there is beside one pipeline; empty where there is nothing."""
        words = []
        if self.axes.size("dp") > 1:
            how = "each with all parameters of its stages"
            if self.replicate == "fsdp":
                how = f"sharded by FSDP, {self.window} stages of a rank whole at a time"
            words.append(f"{self.axes.size('dp')} replicas, {how}")
        if self.axes.size("tp") > 1:
            words.append(f"tensors spread over {self.axes.size('tp')} ranks")
        return "; ".join(words)

    def lowered(self, schedule: Schedule) -> Schedule:
        """Return the program of a schedule, with the reductions and shards that this composition needs.

        A schedule that has its transfers already, from a file say, gets what it lacks: without REDUCE_GRAD the
        replicas would train apart.
        """
        reduce = self.replicate is not None or self.axes.size("tp") > 1 or bool(self.wrapped)
        window = self.window if self.replicate == "fsdp" or FSDP in self.wrapped else None
        if not schedule.passes:
            return lower(schedule, reduce=reduce, window=window)
        there = schedule.passes | passes_seen(schedule.ops)
        if reduce and "reductions" not in there:
            schedule = insert_reductions(schedule)
        if window is not None and "shards" not in there:
            schedule = insert_shards(schedule, window)
        return schedule

    def norm_group(self, how: str | None, given: Any) -> Any:
        """Return the group over whose batches "exact" batch norms normalise: all replicas, unless one is given."""
        replicated = how == "exact" and given is None and self.axes.size("dp") > 1
        return self.axes.mesh.get_group("dp") if replicated else given

    @property
    def is_first(self) -> bool:
        """Whether this pipeline's measurements count for all replicas and parts of tensors."""
        return all(self.axes.index(axis) == 0 for axis in BESIDE)

    def first_says(self, numbers: list[float], transport: DistributedTransport) -> list[float]:
        """Return the numbers of the first rank of the first replica: each would measure others, and cut elsewhere.

        `transport`, of one pipeline, is lost together with the links to others: all name the one that was lost first.
        """
        self.name_axes(transport)
        links = self.link(transport, transport.timeout)
        try:
            answers = transport.exchange(numbers)
            check_built(answers)
            for link in links.values():
                answers = link.all_gather(transport.call, answers[0])
        except PeerFailure as failure:
            for link in links.values():
                link.abort(failure)
            raise
        finally:
            for link in links.values():
                link.close()
        found: list[float] = answers[0]
        return found

    def name_axes(self, transport: DistributedTransport) -> None:
        """Have the failures of this pipeline named with its replica and shard, where there are several."""
        several = {axis: word for axis, word in BESIDE.items() if self.axes.size(axis) > 1}
        transport.name_axes(**{word: self.axes.index(axis) for axis, word in several.items()})

    def link(self, transport: DistributedTransport, timeout: float) -> dict[str, AxisLink]:
        return {
            axis: AxisLink(self.axes.mesh.get_group(axis), timeout, transport, word, unseen=axis == "tp")
            for axis, word in BESIDE.items()
            if self.axes.size(axis) > 1
        }

    def build(self, pipe: Pipeline, places: Sequence[Sequence[tuple[int, str]]]) -> Replication:
        if self.axes.size("dp") > 1 or self.axes.size("tp") > 1 or self.shards:
            from penstock.parallel.compose import compose  # loads DTensor and FSDP

            return compose(pipe, self, places)
        if self.wrapped:
            from penstock.parallel.compose import compose_wrapped  # loads DTensor and FSDP

            return compose_wrapped(pipe)
        return Replication()
