"""A timeline with the name that it is shown under; what every view takes, alone or several side by side."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

from penstock.schedule import Schedule, Timeline
from penstock.view.figures import bytes_text, counted, number


class Run(NamedTuple):
    """One timeline to look at."""

    label: str
    timeline: Timeline
    # By rank, where known: bytes that one microbatch holds in its stages.
    activation: tuple[float, ...] | None = None

    @property
    def sizes(self) -> str:
        return sizes_of(self.timeline.schedule)

    @property
    def peak_memory(self) -> float | None:
        """The most that a rank holds, in whole-rank microbatches: one in a rank's two stages is two halves."""
        return max(held_peaks(self.timeline), default=None)

    @property
    def memory_text(self) -> str:
        """The same in words, in bytes where they are known."""
        peak = self.peak_memory
        if peak is None:
            return ""
        if self.activation is not None:
            return bytes_text(max(map(operator.mul, held_peaks(self.timeline), self.activation)))
        return f"{number(peak)} whole-rank {'microbatch' if peak == 1 else 'microbatches'}"


def held_peaks(timeline: Timeline) -> list[float]:
    """Return the most that each rank holds, in whole-rank microbatches."""
    placement = timeline.schedule.placement
    return [peak / len(placement.stages_of(rank)) for rank, peak in enumerate(timeline.peak_activations)]


def sizes_of(schedule: Schedule) -> str:
    """Format the sizes: `4 ranks, 4 stages, 8 microbatches`."""
    sizes = ((schedule.ranks, "rank"), (schedule.stages, "stage"), (schedule.microbatches, "microbatch"))
    return ", ".join(counted(*size) for size in sizes)


def common_scale(runs: Sequence[Run]) -> float:
    """Return the longest makespan, to draw all runs by; 0 where their times have different units."""
    units = {run.timeline.unit for run in runs}
    return max((run.timeline.makespan for run in runs), default=0.0) if len(units) < 2 else 0.0
