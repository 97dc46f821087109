"""Which schedule a pipeline runs: the one that was given, loaded from a file, built by name or searched for.

With `schedule="auto"` and `balance="time"` cut and schedule are searched for together: the pieces' measured times and
activations are the layers of the search. It knows which rank has which stage only at the end, so the cut comes first
with what it found, and the schedule that was found with it is taken afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ModelError, UsageError
from penstock.model.balance.profile import Weight
from penstock.parallel.group.world import World
from penstock.schedule import Schedule, Topology, family
from penstock.schedule.builders import AUTO, build, is_auto
from penstock.tool import tool

if TYPE_CHECKING:
    from penstock.schedule import FoundCut, Layer


def choose_schedule(
    schedule: str | Schedule, topology: Topology, microbatches: int | None, ranks: int | None, world: World
) -> Schedule:
    if isinstance(schedule, str) and schedule.lower().endswith((".csv", ".json")):
        schedule = Schedule.load(Path(schedule))
    if isinstance(schedule, Schedule):
        if schedule.stages != topology.stages:
            raise UsageError(f"the schedule is for {schedule.stages} stages, the model has {topology.stages}")
        if microbatches is not None and microbatches != schedule.microbatches:
            raise UsageError(
                f"microbatches={microbatches}, but the schedule is for {schedule.microbatches}; leave it out"
            )
        if ranks is not None and ranks != schedule.ranks:
            raise UsageError(f"ranks={ranks}, but the schedule is for {schedule.ranks} ranks; leave ranks= out")
        if schedule.topology != topology:
            if schedule.passes:
                raise UsageError(
                    f"the schedule has its transfers already, for the skips {list(schedule.topology.skips)}, but the "
                    f"model's skips are {list(topology.skips)}; pass the schedule without transfers"
                )
            schedule = schedule.replace(topology=topology)
        world.check_ranks(schedule.ranks, ranks)
        return schedule
    if microbatches is None:
        raise UsageError("say how many microbatches a batch is cut into: microbatches=8")
    if ranks is not None and ranks < 1:
        raise UsageError(f"ranks={ranks}: a pipeline has at least 1")
    entry = None if is_auto(schedule) else family(schedule)
    usual = 1 if entry is None else entry.stages_per_rank
    count = ranks or world.size
    if count is None:
        count = topology.stages // (usual if topology.stages % usual == 0 else 1)
    world.check_ranks(count, ranks)
    if entry is not None and entry.layout == "v" and topology.stages != 2 * count:
        raise UsageError(_not_a_v(entry.name, topology.stages, count, fixed=bool(ranks or world.size)))
    per_rank, left = divmod(topology.stages, count)
    if left or not per_rank:
        nearest = count * (per_rank + 1)
        fewer = max(n for n in range(1, topology.stages + 1) if topology.stages % n == 0 and n <= count)
        instead = f"pass ranks={fewer}" if world.size is None else f"start torchrun with {fewer} processes"
        raise UsageError(
            f"{topology.stages} stages cannot fill {count} ranks evenly; split into {nearest}, or {instead}"
        )
    built = build(AUTO if entry is None else entry.name, count, microbatches, per_rank, skips=topology.skips)
    return built if built.topology == topology else built.replace(topology=topology)


def _not_a_v(name: str, stages: int, ranks: int, fixed: bool) -> str:
    count = 2 * ranks if fixed else stages + 1
    other = "zb-h1" if stages == ranks else "interleaved-zb"
    instead = "" if stages % ranks else f", or take schedule={other!r}"
    return (
        f"{name} has 2 stages on each rank, one on the way down the V and one on the way up; got {stages} stages"
        f"{f' for {ranks} ranks' if fixed else ''}: split into {count}{instead}"
    )


EFFORT = 300  # orders: the same answer on every rank


class SearchedCut:
    """What was found for the pieces of one model, once they are known."""

    def __init__(self, count: int, ranks: int | None, speeds: Sequence[float] | None) -> None:
        self.count, self.ranks, self.speeds = count, ranks, speeds
        self.found: FoundCut | None = None
        self._searching = tool("penstock.tools.search.cut_search", 'schedule="auto" with balance="time"')

    def cuts(self, stages: int, weights: Sequence[Weight], allowed: Sequence[int] | None) -> list[int]:
        """Return the first pieces of stages 1, 2, ...; a cut may be before the `allowed` ones."""
        starts = [0, *(range(1, len(weights)) if allowed is None else allowed)]
        if len(starts) < stages:
            raise ModelError(
                f"the model can be cut into {len(starts)} stages at most, and stages={stages} were asked for"
            )
        ends = [*starts[1:], len(weights)]
        layers = [self._layer(weights[first:end]) for first, end in zip(starts, ends, strict=True)]
        ranks = stages if self.ranks is None else self.ranks
        self.found = self._searching.search_stages(stages, ranks, self.count, layers, self.speeds, EFFORT)
        places, first = [], 0
        for count in self.found.counts[:-1]:
            first += count
            places.append(starts[first])
        return places

    def schedule(self, count: int | None) -> Schedule | None:
        """Return the schedule that belongs to the cut; None as long as there is none."""
        if self.found is None or count is None:
            return None
        return self.found.with_microbatches(count)

    def _layer(self, pieces: Sequence[Weight]) -> Layer:
        """Join pieces that stay together. The three parts of a step are taken to be alike: one time was measured for
        all.
        """
        third = sum(piece.milliseconds for piece in pieces) / 3
        layer: Layer = self._searching.Layer(
            third, third, third, activation=float(sum(piece.activation_bytes for piece in pieces))
        )
        return layer


def searched_cut(
    schedule: str | Schedule,
    balance: str | Sequence[int] | Mapping[str, float] | Any,
    count: int | None,
    ranks: int | None,
    world: World,
    speeds: Sequence[float] | None,
) -> SearchedCut | None:
    """Return the search, where both the cut and the schedule are left to measured times."""
    named = isinstance(schedule, str) and not schedule.lower().endswith((".csv", ".json"))
    if not named or not is_auto(str(schedule)) or balance != "time" or count is None:
        return None
    return SearchedCut(count, ranks or world.size, speeds)
