"""Recorded runs as a command's source: a file that `timeline.save` wrote, or a folder that holds one or several.

Several recordings of one schedule in a folder are recorded steps of one run: the median one stands for them. The folder
of a training run says more about its steps, in `recorded.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from penstock.cli.source import naming
from penstock.errors import Fault, PenstockError, ScheduleError, UsageError
from penstock.reading import read_json
from penstock.schedule import Timeline
from penstock.schedule.files.timeline_json import is_timeline, load
from penstock.view.recorded import Recorded, RecordedSteps, cores_note, run_notes

HEAD = 4096  # bytes that tell what a file is
SHOWN = 3
NOTED = "recorded.json"  # what a training run has noted of its recorded steps


class ShownRun(NamedTuple):
    """A recorded run: the step that is shown, what to say first, and the other recorded steps."""

    timeline: Timeline
    notes: list[str]
    steps: RecordedSteps | None = None


def is_run(source: str) -> bool:
    """Return whether a recorded run is meant, or a folder of some; otherwise it is a schedule's name or file."""
    path = Path(source)
    return path.is_dir() or (path.suffix.lower() == ".json" and path.is_file() and _is_run(path))


def _is_run(path: Path) -> bool:
    with path.open("rb") as file:
        return is_timeline(file.read(HEAD).decode("utf-8-sig", "replace"))


def load_run(source: str) -> Timeline:
    """Load a recorded run; refuse anything else."""
    return load_recording(source).timeline


def load_recording(source: str) -> ShownRun:
    """Load a recorded run with the notes that belong to it; refuse anything else."""
    path = Path(source)
    if path.is_dir():
        found = [entry for entry in sorted(path.glob("*.json")) if entry.is_file() and _is_run(entry)]
        if not found:
            raise UsageError(f'the folder {source} holds no recorded run; write one with timeline.save("run.json")')
        return _alone(found[0], path) if len(found) == 1 else _median(source, found)
    if not is_run(source):
        if not path.is_file():
            raise UsageError(f'there is no recorded run {source}; write one with timeline.save("run.json")')
        raise ScheduleError([Fault(f"{source} is not a recorded run; write one with timeline.save({source!r})")])
    return _alone(path)


def _alone(path: Path, folder: Path | None = None) -> ShownRun:
    timeline = _load(path)
    noted = None if folder is None else folder / NOTED
    if noted is not None and noted.is_file():
        try:
            document = read_json(noted)
            steps = RecordedSteps.read(document)
            return ShownRun(timeline, run_notes(document, steps), steps)
        except PenstockError:
            return ShownRun(timeline, [f"{noted.name} cannot be read: it is not what penstock train writes"])
    note = cores_note(timeline.cores, timeline.ranks)
    return ShownRun(timeline, [note] if note else [])


def _median(source: str, paths: list[Path]) -> ShownRun:
    """Choose the median of several recordings of one schedule, and describe how far the others lie around it."""
    timelines = [_load(path) for path in paths]
    first = timelines[0].schedule
    if any(timeline.schedule != first for timeline in timelines):
        names = ", ".join(path.name for path in paths[:SHOWN])
        raise UsageError(f"{source} holds {len(paths)} recorded runs of different schedules ({names}); name files")
    recorded = [Recorded(place, each.makespan, each.bubble) for place, each in enumerate(timelines, 1)]
    steps = RecordedSteps.of(recorded)
    shown = timelines[steps.shown - 1]
    names = f"{source} holds {len(paths)} recorded steps, numbered by name; step {steps.shown} is "
    notes = [cores_note(shown.cores, shown.ranks), f"{names}{paths[steps.shown - 1].name}.", *steps.notes()]
    return ShownRun(shown, [note for note in notes if note], steps)


def _load(path: Path) -> Timeline:
    try:
        with naming(str(path)):
            timeline = load(path)
    except UsageError as error:  # the file's own doing
        raise ScheduleError([Fault(f"{path}: {error}")]) from None
    if not timeline.spans:
        raise ScheduleError([Fault(f"{path}: nothing was recorded; run a step inside pipe.record()")])
    return timeline
