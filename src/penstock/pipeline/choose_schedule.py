"""Which schedule a pipeline runs: the one that was given, loaded from a file, built by name or searched for."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import UsageError
from penstock.parallel.group.world import World
from penstock.schedule import Schedule, Topology, family
from penstock.schedule.builders import AUTO, build, is_auto


def choose_schedule(
    schedule: str | Schedule, topology: Topology, microbatches: int | None, ranks: int | None, world: World
) -> Schedule:
    """The schedule that was given, loaded or named, for a model with this topology and this world."""
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
    """Stages that do not make a V, and what would."""
    count = 2 * ranks if fixed else stages + 1
    other = "zb-h1" if stages == ranks else "interleaved-zb"
    instead = "" if stages % ranks else f", or take schedule={other!r}"
    return (
        f"{name} has 2 stages on each rank, one on the way down the V and one on the way up; got {stages} stages"
        f"{f' for {ranks} ranks' if fixed else ''}: split into {count}{instead}"
    )
