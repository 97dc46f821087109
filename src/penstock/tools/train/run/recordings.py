"""Recorded steps of a run: which steps are recorded, and which of them is typical.

One step is an anecdote: the last of a run may be its slowest. So the timeline that is shown is of the recorded step
with the median makespan, and what the others took is kept beside it.
"""

from __future__ import annotations

import json
import os
import statistics
from contextlib import ExitStack
from typing import Any

from penstock.errors import FileError
from penstock.pipeline import Pipeline
from penstock.reading import read_json
from penstock.schedule import Timeline
from penstock.schedule.files.timeline_json import to_json
from penstock.tools.train.config.device import device_of
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.run.run_folder import RunFolder
from penstock.view.recorded import Recorded, RecordedSteps, run_notes
from penstock.writing import write_whole

MOST = 15  # timelines that are in memory, the newest
MOST_SPANS = 300_000  # Spans of all timelines in memory; at least three are kept.
LISTED = 1000  # recorded steps whose times are kept


class Recordings:
    """Records two steps of every `logging.every` and the last two: the second one includes what is between steps."""

    def __init__(self, config: TrainConfig, pipe: Pipeline, folder: RunFolder, start: int, writes: bool) -> None:
        self._every, self._steps = config.logging.every, config.training.steps
        self._pipe, self._folder, self._writes = pipe, folder, writes
        self._recording = ExitStack()
        self._timeline: Timeline | None = None
        self._list = [entry for entry in read_recorded(folder)[0] if entry.step <= start] if start else []
        self._kept: list[tuple[Recorded, Timeline]] = []
        self._written: int | None = None  # the step whose timeline is on disk
        self._cores = {"cores": len(os.sched_getaffinity(0)), "ranks": _ranks_here(config)}

    def begin(self, coming: int) -> None:
        """Begin to record before step `coming`, where that is due."""
        if self._timeline is None and self._records(coming):
            self._timeline = self._recording.enter_context(self._pipe.record())

    def unrecorded(self, coming: int, most: int) -> int:
        """Count the steps from `coming` on, up to `most`, that are not recorded."""
        if self._timeline is not None:
            return 0
        steps = range(coming, coming + most)
        return next((step - coming for step in steps if self._records(step)), most)

    def _records(self, step: int) -> bool:
        return step % self._every in (0, self._every - 1) or step >= self._steps - 1

    def end(self, step: int, last: bool) -> Recorded | None:
        """Return what was recorded of a step that has ended, if it is the second of two or the `last`."""
        if self._timeline is None or not (step % self._every == 0 or step >= self._steps or last):
            return None
        self.close()
        timeline, self._timeline = self._timeline, None
        if not timeline.spans:
            return None
        found = Recorded(step, timeline.makespan, timeline.bubble)
        if self._writes:
            self._keep(found, timeline)
        return found

    def close(self) -> None:
        """Stop recording."""
        self._recording.close()

    def _keep(self, found: Recorded, timeline: Timeline) -> None:
        self._list = [*self._list, found][-LISTED:]
        most = max(3, min(MOST, MOST_SPANS // len(timeline.spans)))
        self._kept = [*self._kept, (found, timeline)][-most:]
        typical, shown = self._typical()
        if typical.step != self._written:
            write_whole(self._folder.timeline, to_json(shown))
            self._written = typical.step
        document = {"typical": typical.step, "of": len(self._list[-MOST:]), **self._cores, "steps": self._list}
        write_whole(self._folder.recorded, json.dumps(document) + "\n")

    def _typical(self) -> tuple[Recorded, Timeline]:
        """Choose of the timelines in memory the one nearest to the median of all that were recorded lately."""
        middle = statistics.median_low([entry.makespan for entry in self._list[-MOST:]])
        return min(self._kept, key=lambda each: abs(each[0].makespan - middle))


def _ranks_here(config: TrainConfig) -> int:
    """Count the ranks that share this host's cores; 0 where they compute on an accelerator."""
    if device_of(config) is not None:
        return 0
    if config.pipeline.workers == "threads":
        return config.pipeline.ranks
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def read_recorded(folder: RunFolder) -> tuple[list[Recorded], dict[str, Any]]:
    """Read the recorded steps of a run's folder, and the rest of what is known of them."""
    try:
        document: dict[str, Any] = read_json(folder.recorded)
        steps = RecordedSteps.read(document)
        return ([] if steps is None else list(steps.steps)), document
    except (FileNotFoundError, FileError):
        return [], {}


def recorded_steps(folder: RunFolder) -> RecordedSteps | None:
    """Read the recorded steps of a run's folder, for a view; None where there are none."""
    document = read_recorded(folder)[1]
    return RecordedSteps.read(document) if document else None


def recorded_notes(folder: RunFolder) -> list[str]:
    """Describe what a reader of the timeline should know first."""
    return run_notes(read_recorded(folder)[1], recorded_steps(folder))
