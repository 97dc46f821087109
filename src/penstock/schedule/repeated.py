"""Steps back to back: the program that each rank runs if it goes from one step into the next by itself.

A rank that waits for nobody at the end of a step runs its row again and again. That is a schedule too, whose
microbatches are counted on: with 4 microbatches per step, `0F5` is `0F1` of the second step. So the simulator and the
proof need no rule of their own for adjacent steps.
"""

from __future__ import annotations

from itertools import pairwise

from penstock.rules import check_count
from penstock.schedule.columns import Columns
from penstock.schedule.schedule import Schedule


def repeated(schedule: Schedule, steps: int) -> Schedule:
    """Return the schedule of that many steps: each rank runs its row once per step, and microbatches are counted on.

    Args:
        schedule: The schedule or program of one step.
        steps: Number of steps.
    """
    check_count("steps", steps)
    if steps == 1:
        return schedule
    import numpy as np

    columns, count = schedule.columns, schedule.microbatches
    bounds = columns.starts.tolist()
    order = np.concatenate([np.tile(np.arange(a, b), steps) for a, b in pairwise(bounds)])
    step = np.concatenate([np.repeat(np.arange(steps), b - a) for a, b in pairwise(bounds)])
    lengths = np.array(columns.lengths)
    position = columns.position[order] + step * lengths[columns.rank[order]]
    microbatch = columns.microbatch[order]
    microbatch = np.where(microbatch < 0, microbatch, microbatch + step * count)
    made = Columns(
        tuple((lengths * steps).tolist()),
        columns.starts * steps,
        position.astype(np.int32),
        columns.stage[order],
        columns.op[order],
        microbatch.astype(np.int32),
        columns.peer[order],
    )
    return schedule.replace(made, microbatches=count * steps)
