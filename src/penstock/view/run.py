"""A timeline with the name that it is shown under; what every view takes, alone or several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.schedule import Timeline

__all__ = ["Run", "same_unit"]


class Run(NamedTuple):
    """One timeline to look at."""

    label: str
    timeline: Timeline

    @property
    def sizes(self) -> str:
        """What was run, in words."""
        schedule = self.timeline.schedule
        ranks, stages, microbatches = schedule.ranks, schedule.stages, schedule.microbatches
        return (
            f"{ranks} rank{'s' * (ranks != 1)}, {stages} stage{'s' * (stages != 1)}, "
            f"{microbatches} microbatch{'es' * (microbatches != 1)}"
        )


def same_unit(runs: Sequence[Run]) -> bool:
    """May their times be compared?"""
    return len({run.timeline.unit for run in runs}) < 2
