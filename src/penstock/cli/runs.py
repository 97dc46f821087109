"""Recorded runs as a command's source: a file that `timeline.save` wrote, or a folder that holds one."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.source import naming
from penstock.errors import Fault, ScheduleError, UsageError
from penstock.schedule import Timeline
from penstock.schedule.files.timeline_json import is_timeline, load

HEAD = 4096  # bytes that tell what a file is
SHOWN = 3


def find_run(source: str) -> Path | None:
    """The recorded run that is meant, if one is; None for a schedule's name or file."""
    path = Path(source)
    if path.is_dir():
        found = [entry for entry in sorted(path.glob("*.json")) if entry.is_file() and _is_run(entry)]
        if len(found) != 1:
            names = ", ".join(entry.name for entry in found[:SHOWN]) or "none"
            raise UsageError(f"{source} holds {len(found)} recorded runs ({names}); name the file that is meant")
        return found[0]
    return path if path.suffix.lower() == ".json" and path.is_file() and _is_run(path) else None


def _is_run(path: Path) -> bool:
    with path.open("rb") as file:
        return is_timeline(file.read(HEAD).decode("utf-8-sig", "replace"))


def load_run(source: str) -> Timeline:
    """A recorded run that must be one."""
    path = find_run(source)
    if path is None:
        if not Path(source).is_file():
            raise UsageError(f'there is no recorded run {source}; write one with timeline.save("run.json")')
        raise ScheduleError([Fault(f"{source} is not a recorded run; write one with timeline.save({source!r})")])
    try:
        with naming(source):
            timeline = load(path)
    except UsageError as error:  # the file's own doing
        raise ScheduleError([Fault(f"{source}: {error}")]) from None
    if not timeline.spans:
        raise ScheduleError([Fault(f"{source}: nothing was recorded; run a step inside pipe.record()")])
    return timeline
