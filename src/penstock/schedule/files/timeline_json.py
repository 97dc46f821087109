"""A timeline as JSON: what was run and when, so that it can be looked at, priced and compared later.

The schedule is inside, in the form that schedules have alone, because a run without it could
not be accounted for. Times stand as they were measured or simulated, in `unit`; those of
several hosts have been put on one clock before they came here. A file that is anything else
is refused with every fault, before a view could draw nonsense from it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from os import PathLike
from typing import Any

from penstock import writing
from penstock.errors import Fault, NotationError, ScheduleError
from penstock.rules import is_index
from penstock.schedule.action import Action, parse
from penstock.schedule.files.reading import MOST_CELLS, parse_json, read_file
from penstock.schedule.files.text import from_json as schedule_from_json
from penstock.schedule.files.text import to_json as schedule_to_json
from penstock.schedule.proof.shape import shape_faults
from penstock.schedule.schedule import Schedule
from penstock.schedule.timing.timeline import Span, Timeline, Wall

FORMAT = 1
MARK = "penstock_timeline"
LONGEST_UNIT = 20
LARGEST = sys.float_info.max  # a whole number in JSON may be larger
NUMBERS = 5 * MOST_CELLS  # Numbers of a file: five for each span.
MOST_CORES = 1_000_000
SHOWN = 20  # faults of a file: a wrong one is wrong in every line


def save(timeline: Timeline, path: str | PathLike[str]) -> None:
    """Write a `.json` file."""
    writing.save(path, to_json(timeline))


def load(path: str | PathLike[str]) -> Timeline:
    """Read what `save` wrote."""
    return from_json(read_file(path, cells=NUMBERS))


def is_timeline(text: str) -> bool:
    """Return whether this is the text of a timeline, and not of a schedule."""
    return f'"{MARK}"' in text[:200]


def to_json(timeline: Timeline) -> str:
    """Write the whole value; of a simulation, all but the arrival of messages."""
    head = {
        MARK: FORMAT,
        "unit": timeline.unit,
        "clock_error": timeline.clock_error,
        "cores": timeline.cores,
        "peak_activations": list(timeline.peak_activations),
        "peak_memory": list(timeline.peak_memory),
        "walls": [list(wall) for wall in timeline.walls],
        "schedule": json.loads(schedule_to_json(timeline.schedule)),
    }
    lists = ",\n".join(f'"{name}": {_rows(getattr(timeline, name))}' for name in ("spans", "chores"))
    return f"{json.dumps(head)[:-1]},\n{lists}}}\n"


def _rows(spans: Iterable[Span]) -> str:
    rows = ",\n".join(json.dumps([rank, str(action), start, end, wait]) for rank, action, start, end, wait in spans)
    return f"[\n{rows}\n]" if rows else "[]"


def from_json(text: str) -> Timeline:
    """Read what `to_json` wrote."""
    document = parse_json(text)
    if not isinstance(document, dict) or document.get(MARK) != FORMAT:
        raise NotationError(f'a recorded run in JSON has "{MARK}": {FORMAT} at its top')
    wrong = [name for name, kind in _KEYS.items() if not isinstance(document.get(name), kind)]
    if wrong:
        raise NotationError([Fault(f"no complete timeline in JSON: {name!r} is missing or wrong") for name in wrong])
    schedule = schedule_from_json(json.dumps(document["schedule"]))
    shape = list(shape_faults(schedule))
    if shape:
        raise ScheduleError(shape)
    faults: list[Fault] = []
    known: dict[str, Action] = {}
    spans, chores = (tuple(_spans(document[name], name, schedule, known, faults)) for name in ("spans", "chores"))
    walls = tuple(_walls(document["walls"], schedule.ranks, faults))
    if len(document["unit"]) > LONGEST_UNIT or not document["unit"].isprintable():
        faults.append(Fault(f"unit is not a unit of time, such as 's': {document['unit'][:40]!r}"))
    if not _is_time(document["clock_error"]):
        faults.append(Fault(f"clock_error is not a time: {document['clock_error']}"))
    cores = document.get("cores", 0)  # files of before have none
    if not is_index(cores, MOST_CORES):
        faults.append(Fault(f"cores is not a number of cores: {str(cores)[:40]}"))
    peaks = [document[name] for name in ("peak_activations", "peak_memory")]
    for name, numbers in zip(("peak_activations", "peak_memory"), peaks, strict=True):
        if len(numbers) not in (0, schedule.ranks) or not all(map(_is_time, numbers)):
            faults.append(Fault(f"{name} holds one number for each of {schedule.ranks} ranks, or none"))
    if faults:
        more = [Fault(f"... and {len(faults) - SHOWN} more")] if len(faults) > SHOWN else []
        raise ScheduleError(faults[:SHOWN] + more)
    return Timeline(
        schedule,
        spans,
        tuple(peaks[0]),
        tuple(peaks[1]),
        chores=chores,
        walls=walls,
        clock_error=document["clock_error"],
        unit=document["unit"],
        cores=cores,
    )


def _spans(
    entries: list[Any], name: str, schedule: Schedule, known: dict[str, Action], faults: list[Fault]
) -> Iterator[Span]:
    last = [-math.inf] * schedule.ranks
    for position, entry in enumerate(entries):
        if not (isinstance(entry, list) and len(entry) == 5 and isinstance(entry[1], str)):
            faults.append(Fault(f"{name}[{position}] is not [rank, action, start, end, wait]: {str(entry)[:60]}"))
            continue
        rank, text, start, end, wait = entry
        try:
            action = known[text] if text in known else known.setdefault(text, parse(text))
        except NotationError as error:
            faults.append(Fault(f"{name}[{position}]: {error.faults[0].message}"))
            continue
        if not (all(map(_is_time, (start, end, wait))) and start <= end and wait >= 0):
            faults.append(Fault(f"{name}[{position}], {text}: {start!r} to {end!r} after {wait!r} is not a span"))
        elif not is_index(rank, schedule.ranks):
            faults.append(Fault(f"{name}[{position}], {text}: there is no rank {rank!r}"))
        elif any(
            part.stage >= schedule.stages or schedule.placement.rank_of(part.stage) != rank for part in action.parts()
        ):
            faults.append(Fault(f"{name}[{position}], {text}: rank {rank} does not own that stage"))
        elif start < last[rank]:
            faults.append(Fault(f"{name}[{position}], {text}: starts before the span of rank {rank} that stands first"))
        else:
            last[rank] = start
            yield Span(rank, action, start, end, wait)


def _walls(entries: list[Any], ranks: int, faults: list[Fault]) -> Iterator[Wall]:
    if len(entries) not in (0, ranks):
        faults.append(Fault(f"walls holds one entry for each of {ranks} ranks, or none; got {len(entries)}"))
    for rank, entry in enumerate(entries):
        good = isinstance(entry, list) and len(entry) == len(Wall._fields) and all(map(_is_time, entry))
        if not good or not entry[0] <= entry[1] <= entry[2]:
            faults.append(Fault(f"walls[{rank}] is not [start, end, done, optimizer] in order: {str(entry)[:60]}"))
        else:
            yield Wall(*entry)


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


_KEYS: dict[str, type | tuple[type, ...]] = {
    "unit": str,
    "clock_error": (int, float),
    "peak_activations": list,
    "peak_memory": list,
    "walls": list,
    "schedule": dict,
    "spans": list,
    "chores": list,
}
