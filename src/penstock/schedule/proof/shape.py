"""What makes rows of actions no schedule at all: rows, stages and microbatches that do not fit together."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import Fault
from penstock.schedule.schedule import Schedule

FEW = 100_000  # missing computes that are still listed one by one


def shape_faults(schedule: Schedule) -> Iterator[Fault]:
    """Yield what makes it no schedule at all: rows, stages and microbatches that do not fit together."""
    import numpy as np

    stages, microbatches = schedule.placement.stages, schedule.microbatches
    if schedule.ranks != schedule.placement.ranks:
        yield Fault(
            f"{schedule.ranks} rows for a placement on {schedule.placement.ranks} ranks; give each rank one row"
        )
    crowd = crowd_fault(schedule)
    if crowd is not None:
        yield crowd
    columns = schedule.columns
    for rank in np.flatnonzero(np.diff(columns.starts) == 0).tolist():
        yield Fault("the row has no action; every rank runs something", rank)
    strange = columns.stage >= stages
    homes = np.array(schedule.placement.by_stage, dtype=np.int32)
    home = homes[np.minimum(columns.stage, stages - 1)]
    away = (home != columns.rank) & ~strange
    late = columns.microbatch >= microbatches
    nowhere = columns.peer >= stages
    for number in np.flatnonzero(strange | away | late | nowhere).tolist():
        at = schedule.place(number)
        action = at[2]
        if strange[number]:
            yield Fault(f"there is no stage {action.stage}: stages are 0 to {stages - 1}", *at)
        if away[number]:
            yield Fault(f"stage {action.stage} lives on rank {home[number]}", *at)
        if late[number]:
            span = f"there are {microbatches}, 0 to {microbatches - 1}"
            yield Fault(f"microbatch {action.microbatch} is out of range: {span}", *at)
        if nowhere[number]:
            yield Fault(f"there is no stage {action.peer}: stages are 0 to {stages - 1}", *at)
    seen = np.bincount(columns.stage[~strange], minlength=stages)
    for stage in np.flatnonzero(seen == 0).tolist():
        yield Fault(f"stage {stage} appears in no row; is the row of its rank missing?")


def crowd_fault(schedule: Schedule) -> Fault | None:
    """Return a fault if there are far more microbatches than the rows could run, before that much is built."""
    size, there = schedule.stages * schedule.microbatches, sum(schedule.columns.lengths)
    if size <= FEW + 2 * there:
        return None
    meant = f"{schedule.microbatches} microbatches in {schedule.stages} stages are {size} forwards"
    return Fault(f"{meant}, but the rows have only {there} entries")
