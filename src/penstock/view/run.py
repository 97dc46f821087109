"""A timeline with the name that it is shown under; what every view takes, alone or several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.schedule import Schedule, Timeline
from penstock.view.figures import counted


class Run(NamedTuple):
    """One timeline to look at."""

    label: str
    timeline: Timeline

    @property
    def sizes(self) -> str:
        return sizes_of(self.timeline.schedule)


def sizes_of(schedule: Schedule) -> str:
    """`4 ranks, 4 stages, 8 microbatches`."""
    sizes = ((schedule.ranks, "rank"), (schedule.stages, "stage"), (schedule.microbatches, "microbatch"))
    return ", ".join(counted(*size) for size in sizes)


def common_scale(runs: Sequence[Run]) -> float:
    """The longest makespan, to draw all runs by; 0 where their times have different units."""
    units = {run.timeline.unit for run in runs}
    return max((run.timeline.makespan for run in runs), default=0.0) if len(units) < 2 else 0.0
