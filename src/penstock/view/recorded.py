"""Several recorded steps of one run: which is shown, how far the others lie around it, and which of them are outliers.

One step is an anecdote: the last of a run may be its slowest. So the step with the median makespan is shown, and what
the others took is told beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from penstock.errors import FileError
from penstock.reading import check_like
from penstock.view.figures import percent, time_text

ORIGIN = "the note of recorded steps"
# What a training run notes.
NOTED = {"typical": 0, "of": 0, "cores": 0, "ranks": 0, "steps": [[0]]}
LONGEST = 1e12  # seconds; more is no recording
OUTLIER = 1.5  # times the median makespan
LISTED = 5  # outliers that are named
FEW = 4  # steps, from which on quartiles mean something


class Recorded(NamedTuple):
    """One recorded step; seconds from its first action to its last, and the idle share of all ranks."""

    step: int
    makespan: float
    idle: float


@dataclass(frozen=True)
class RecordedSteps:
    """Recorded steps, at least one, and which of them is shown."""

    steps: tuple[Recorded, ...]
    shown: int  # the number of that step

    @classmethod
    def of(cls, steps: Sequence[Recorded]) -> Self:
        """Choose the step with the median makespan to be shown; of an even number, the faster in the middle."""
        middle = statistics.median_low([entry.makespan for entry in steps])
        return cls(tuple(steps), next(entry.step for entry in steps if entry.makespan == middle))

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self | None:
        """Read the steps that a training run has noted; None where there are none, FileError for anything else."""
        check_like(document, NOTED, ORIGIN)
        entries = document.get("steps")
        if entries is None or not all(len(entry) == len(Recorded._fields) for entry in entries):
            raise FileError(ORIGIN, "it has no list of [step, seconds, idle share]")
        steps = tuple(Recorded(int(step), float(time), float(idle)) for step, time, idle in entries)
        if not all(0 <= each.makespan < LONGEST and 0 <= each.idle <= 1 for each in steps):
            raise FileError(ORIGIN, "a step has a time or an idle share that none has")
        return cls(steps, int(document.get("typical", steps[-1].step))) if steps else None

    @property
    def median(self) -> float:
        """The median makespan."""
        return statistics.median(entry.makespan for entry in self.steps)

    @property
    def outliers(self) -> list[Recorded]:
        """Steps that took far longer than the median, the slowest first."""
        slow = [entry for entry in self.steps if entry.makespan > OUTLIER * self.median]
        return sorted(slow, key=lambda entry: -entry.makespan)

    def spread(self) -> str:
        """Describe the median and how far the others lie around it; nothing of a single step."""
        times = sorted(entry.makespan for entry in self.steps)
        if len(times) < 2:
            return ""
        text = f"Median {time_text(self.median, 's')} of {len(times)} recorded steps"
        if len(times) >= FEW:
            low, _, high = statistics.quantiles(times, n=4, method="inclusive")
            half = f"half of them within {time_text(low, 's')} and {time_text(high, 's')}, "
        else:
            half = ""
        return f"{text}: {half}all within {time_text(times[0], 's')} and {time_text(times[-1], 's')}."

    def outlier_note(self) -> str:
        """Name the slowest outliers; nothing where there is none."""
        slow, middle = self.outliers, self.median
        if not slow:
            return ""
        named = ", ".join(f"step {each.step} ({each.makespan / middle:.1f} times the median)" for each in slow[:LISTED])
        more = f" and {len(slow) - LISTED} more" if len(slow) > LISTED else ""
        return f"Outliers among them: {named}{more}."

    def shown_note(self, of: int | None = None) -> str:
        """Describe which step the timeline is of; `of`: among how many the median was looked for."""
        entry = next((each for each in self.steps if each.step == self.shown), self.steps[-1])
        count = len(self.steps) if of is None else of
        one = f"the nearest to the median of {count} recorded steps" if count > 1 else "the only recorded step"
        figures = f"{time_text(entry.makespan, 's')}, {percent(entry.idle)} idle"
        return f"The timeline is of step {entry.step}, {one}: {figures}."

    def notes(self, of: int | None = None) -> list[str]:
        """Return all of that in sentences."""
        return [note for note in (self.shown_note(of), self.spread(), self.outlier_note()) if note]

    def document(self) -> dict[str, Any]:
        """Return what a page needs."""
        slow = set(self.outliers)
        return {
            "steps": [[entry.step, entry.makespan] for entry in self.steps],
            "median": self.median,
            "outliers": [place for place, entry in enumerate(self.steps) if entry in slow],
            "shown": self.shown,
            "text": " ".join(note for note in (self.spread(), self.outlier_note()) if note),
        }


def cores_note(cores: int, ranks: int) -> str:
    """Describe that ranks share cores; nothing where each has its own."""
    if not 0 < cores < ranks:
        return ""
    return (
        f"This machine has {cores} core{'s' if cores != 1 else ''} for {ranks} ranks, so ranks take turns: waits and "
        "idle shares say more about the machine than about the schedule, no rebalancing helps, and advice drawn from "
        "them may not hold where every rank has a core."
    )


def run_notes(document: Mapping[str, Any], steps: RecordedSteps | None) -> list[str]:
    """Return what a reader of a training run's timeline should know first: too few cores, which step it is, and
    outliers.
    """
    notes = [cores_note(document.get("cores", 0), document.get("ranks", 0))]
    if steps is not None:
        notes += steps.notes(document.get("of"))
    return [note for note in notes if note]
