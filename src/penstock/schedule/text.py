"""A schedule as text: the drawing, the CSV dialect that torch reads, and JSON.

CSV is what people carry between libraries: one row a rank, blank cells for idle slots. It
cannot say how many microbatches were meant or which passes have run, so those are read off
the actions. JSON holds the whole value and gives back an equal one.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.errors import Fault, NotationError, ScheduleError, UsageError
from penstock.schedule.action import Action, Op, parse
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Row, Schedule, actions_of
from penstock.schedule.topology import Topology

__all__ = ["draw", "load", "read_text", "save"]

IDLE = "."
# one terminal colour for each kind of compute, the same for all its microbatches; told apart
# without colour by the letter
COLORS = {Op.F: "34", Op.B: "32", Op.I: "36", Op.W: "33", Op.OVERLAP_F_B: "35", Op.OVERLAP_B_F: "35"}
FORMAT = 1


def draw(schedule: Schedule, width: int | None, color: bool) -> str:
    """The grid; see `Schedule.draw`."""
    slots = schedule.slots
    cells = [[_cell(row[slot]) if slot < len(row) else IDLE for slot in range(slots)] for row in schedule.rows]
    widths = [max(len(str(slot)), *(len(row[slot]) for row in cells)) for slot in range(slots)]
    labels = [f"rank {rank}" for rank in range(schedule.ranks)]
    margin = max(map(len, labels))
    bands = []
    for first, last in _bands(widths, None if width is None else width - margin):
        head = [str(slot).ljust(widths[slot]) for slot in range(first, last)]
        lines = [" ".join(["slot".ljust(margin), *head]).rstrip()]
        for label, row, actions in zip(labels, cells, schedule.rows, strict=True):
            shown = [
                _paint(row[slot].ljust(widths[slot]), actions[slot] if slot < len(actions) else None, color)
                for slot in range(first, last)
            ]
            lines.append(" ".join([label.ljust(margin), *shown]).rstrip())
        bands.append("\n".join(lines))
    return "\n\n".join(bands)


def _cell(action: Action | None) -> str:
    if action is None:
        return IDLE
    return str(action) if action.pair is None else f"({action.pair[0]};{action.pair[1]})"


def _paint(text: str, action: Action | None, color: bool) -> str:
    code = COLORS.get(action.op) if action is not None else None
    return f"\x1b[{code}m{text}\x1b[0m" if color and code else text


def _bands(widths: Sequence[int], room: int | None) -> Iterable[tuple[int, int]]:
    first, used = 0, 0
    for slot, size in enumerate(widths):
        if room is not None and slot > first and used + 1 + size > room:
            yield first, slot
            first, used = slot, 0
        used += 1 + size
    yield first, len(widths)


def read_text(text: str | Iterable[str]) -> list[list[Action | None]]:
    """Rows from text lines, or from a drawing, wrapped or not."""
    lines = text.splitlines() if isinstance(text, str) else list(text)
    rows: list[list[Action | None]] = []
    number = 0
    for line_number, line in enumerate(lines, 1):
        label = re.match(r"\s*rank (\d+)\s*[:|]?\s", line + " ")
        cells = (line[label.end() :] if label else line).split()
        if not line.strip() or line.lstrip().startswith(("slot", "#")):
            continue
        number = int(label[1]) if label else len(rows)
        if number > len(rows):
            raise ScheduleError(f"line {line_number} is for rank {number}, but rank {len(rows)} has no line before it")
        if number == len(rows):
            rows.append([])
        rows[number] += [_read_cell(cell, line_number, column) for column, cell in enumerate(cells, 1)]
    return rows


def _read_cell(cell: str, row: int, column: int) -> Action | None:
    if cell == IDLE:
        return None
    if cell.startswith("(") and cell.endswith(")") and cell.count(";") == 1:
        backward_first = re.match(r"\([0-9]+[BIW]", cell)
        return parse(f"{cell}{Op.OVERLAP_B_F if backward_first else Op.OVERLAP_F_B}", row, column)
    return parse(cell, row, column)


def save(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Write `.csv` or `.json`."""
    path = Path(path)
    text = {".csv": to_csv, ".json": to_json}[_kind(path)](schedule)
    path.write_text(text, encoding="utf-8", newline="")


def load(path: str | PathLike[str], facts: dict[str, Any]) -> Schedule:
    """Read `.csv` or `.json`; `facts` override or check what the file implies."""
    path = Path(path)
    kind = _kind(path)
    ranks = facts.pop("ranks", None)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise NotationError(f"{path.name} is not text in UTF-8: {error}") from error
    schedule = (from_csv if kind == ".csv" else from_json)(text, facts)
    if ranks is not None and schedule.ranks != ranks:
        missing = range(schedule.ranks, ranks)
        raise ScheduleError(
            [Fault("has no row in the file", rank) for rank in missing]
            or [Fault(f"{path.name} has {schedule.ranks} rows, for {ranks} ranks: {schedule.ranks - ranks} too many")]
        )
    return schedule


def _kind(path: Path) -> str:
    kind = path.suffix.lower()
    if kind not in (".csv", ".json"):
        raise UsageError(f"{path.name}: the name of a schedule's file ends in .csv or .json, so that its form is known")
    return kind


def to_csv(schedule: Schedule) -> str:
    """One row a rank, blank cells for idle slots."""
    out = io.StringIO()
    csv.writer(out).writerows([("" if action is None else str(action)) for action in row] for row in schedule.rows)
    return out.getvalue()


def from_csv(text: str, facts: dict[str, Any]) -> Schedule:
    """Read torch's dialect, compute-only or with transfers."""
    try:
        rows = actions_of(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise NotationError(f"not CSV: {error}") from error
    blank = [number for number, row in enumerate(rows) if not any(row)]
    if blank or not rows:
        raise ScheduleError(
            [Fault("the row is blank; every rank needs its row", rank) for rank in blank] or "the file has no row"
        )
    return Schedule(rows, **facts)


def to_json(schedule: Schedule) -> str:
    """The whole value."""
    document = {
        "penstock_schedule": FORMAT,
        "name": schedule.name,
        "placement": list(schedule.placement),
        "microbatches": schedule.microbatches,
        "edges": [list(edge) for edge in schedule.topology.edges],
        "forward_only": schedule.forward_only,
        "passes": sorted(schedule.passes),
    }
    head = json.dumps(document, indent=2)[:-2]
    rows = ",\n".join(
        f"    {json.dumps([None if action is None else str(action) for action in row])}" for row in schedule.rows
    )
    return f'{head},\n  "rows": [\n{rows}\n  ]\n}}\n'


def from_json(text: str, facts: dict[str, Any]) -> Schedule:
    """Read what `to_json` wrote."""
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise NotationError(f"not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("penstock_schedule") != FORMAT:
        raise NotationError(f'a schedule in JSON has "penstock_schedule": {FORMAT} at its top')
    missing = [key for key in _KEYS if type(document.get(key)) is not _KEYS[key]]
    if not missing and not {"transfers", "reductions", "shards"}.issuperset(map(str, document["passes"])):
        missing = ["passes"]
    if missing:
        raise NotationError([Fault(f"the JSON is not a whole schedule: {key!r} is missing or odd") for key in missing])
    try:
        known = {
            "placement": Placement(document["placement"]),
            "microbatches": document["microbatches"],
            "topology": Topology(len(document["placement"]), [(source, to) for source, to in document["edges"]]),
            "forward_only": document["forward_only"],
            "name": document["name"],
            "passes": frozenset(document["passes"]),
        }
        rows: list[list[Action | None]] = actions_of(document["rows"])
        return Schedule(rows, **{**known, **facts})
    except ScheduleError:
        raise
    except UsageError as error:
        raise NotationError(f"the JSON is not a whole schedule: {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise NotationError(f"the JSON is not a whole schedule: {type(error).__name__} {error}") from error


_KEYS = {
    "placement": list,
    "microbatches": int,
    "edges": list,
    "forward_only": bool,
    "name": str,
    "passes": list,
    "rows": list,
}


def unpadded(row: Row) -> Row:
    """The row without idle slots at its end."""
    end = len(row)
    while end and row[end - 1] is None:
        end -= 1
    return row[:end]
