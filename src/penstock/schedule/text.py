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
from penstock.schedule.facts import check_facts, taken
from penstock.schedule.files import MOST_STAGES, read_file
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.seen import PASSES, Row, actions_of, skips_seen
from penstock.schedule.topology import Topology

__all__ = ["draw", "load", "read_cells", "read_text", "save"]

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
    lines = text.splitlines() if isinstance(text, str) else list(text) if isinstance(text, Iterable) else [text]
    odd = [line for line in lines if not isinstance(line, str)]
    if odd:
        raise UsageError(f"rows of text are lines such as '0F0 0F1 . 0B0', one for each rank; got {odd[0]!r}")
    rows: list[list[str]] = []  # of cells
    places: list[list[tuple[int, int]]] = []  # of the same cells: line and column
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
            places.append([])
        rows[number] += cells
        places[number] += [(line_number, column) for column in range(1, len(cells) + 1)]

    def read(cell: str, row: int, column: int) -> Action:
        return _read_cell(cell, *places[row - 1][column - 1])

    return actions_of(rows, IDLE, read)


def read_cells(rows: Iterable[Iterable[Action | str | None]]) -> list[list[Action | None]]:
    """Rows in which some cells, or all, are text."""

    def read(cell: Action | str, row: int, column: int) -> Action:
        return cell if isinstance(cell, Action) else _read_cell(cell, row, column)

    return actions_of(rows, IDLE, read)


def _read_cell(cell: str, row: int, column: int) -> Action:
    if cell.startswith("(") and cell.endswith(")") and cell.count(";") == 1:
        backward_first = re.match(r"\([0-9]+[BIW]", cell)
        return parse(f"{cell}{Op.OVERLAP_B_F if backward_first else Op.OVERLAP_F_B}", row, column)
    return parse(cell, row, column)


def save(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Write `.csv` or `.json`."""
    path = Path(path)
    text = {".csv": to_csv, ".json": to_json}[_kind(path)](schedule)
    path.write_text(text, encoding="utf-8", newline="")


def load(path: str | PathLike[str], facts: dict[str, Any], check: bool = True) -> Schedule:
    """Read `.csv` or `.json`, and see whether it is for the stated `facts`; all faults at once."""
    path = Path(path)
    kind = _kind(path)
    text = read_file(path)
    if kind == ".csv":
        schedule = from_csv(text, taken(facts))
    else:
        taken(facts)
        schedule = from_json(text)
    if schedule.stages > MOST_STAGES:
        raise ScheduleError(f"{path.name} has {schedule.stages:,} stages; at most {MOST_STAGES:,} are read")
    found = check_facts(schedule, facts, whole=kind == ".json")
    if check:
        found += [fault for fault in schedule.shape_faults() if fault not in found]
    if found:
        raise ScheduleError(found)
    return schedule


def _kind(path: Path) -> str:
    kind = path.suffix.lower()
    if kind not in (".csv", ".json"):
        raise UsageError(f"{path.name}: the name of a schedule's file ends in .csv or .json, so that its form is known")
    return kind


def to_csv(schedule: Schedule) -> str:
    """One row a rank, blank cells for idle slots. The edges must be those that can be read off the rows."""
    there = Topology.chain(schedule.stages, skips_seen(schedule.rows, schedule.stages))
    if there != schedule.topology:
        odd = sorted(set(there.edges) ^ set(schedule.topology.edges))
        shown = ", ".join(f"{source} -> {target}" for source, target in odd[:3])
        raise UsageError(
            f"CSV holds actions alone, and no transfer in the rows tells the edge {shown}; save it as .json "
            "(or write the rows yourself, and load them with topology=)"
        )
    if schedule.recompute:
        raise UsageError(
            f"CSV holds actions alone, not that stages {sorted(schedule.recompute)} recompute; save it as .json"
        )
    return rows_to_csv(schedule.rows)


def rows_to_csv(rows: Iterable[Iterable[Action | None]]) -> str:
    """The cells alone, whatever they mean."""
    out = io.StringIO()
    csv.writer(out).writerows([("" if action is None else str(action)) for action in row] for row in rows)
    return out.getvalue()


def from_csv(text: str, facts: dict[str, Any]) -> Schedule:
    """Read torch's dialect, compute-only or with transfers."""
    try:
        cells = list(csv.reader(io.StringIO(text, newline="")))
        while cells and not "".join(cells[-1]).strip() and len(cells[-1]) < 2:  # a blank line at the end
            cells.pop()
        rows = actions_of(cells)
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
        "recompute": sorted(schedule.recompute),
        "passes": sorted(schedule.passes),
    }
    head = json.dumps(document, indent=2)[:-2]
    rows = ",\n".join(
        f"    {json.dumps([None if action is None else str(action) for action in row])}" for row in schedule.rows
    )
    return f'{head},\n  "rows": [\n{rows}\n  ]\n}}\n'


def from_json(text: str) -> Schedule:
    """Read what `to_json` wrote."""
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise NotationError(f"not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("penstock_schedule") != FORMAT:
        raise NotationError(f'a schedule in JSON has "penstock_schedule": {FORMAT} at its top')
    missing = [key for key in _KEYS if type(document.get(key)) is not _KEYS[key]]
    if not missing and not PASSES.issuperset(map(str, document["passes"])):
        missing = ["passes"]
    if not missing and not document["name"].isprintable():  # it is shown on terminals
        missing = ["name"]
    if missing:
        raise NotationError([Fault(f"the JSON is not a whole schedule: {key!r} is missing or odd") for key in missing])
    try:
        known = {
            "placement": Placement(document["placement"]),
            "microbatches": document["microbatches"],
            "topology": Topology(len(document["placement"]), [(source, to) for source, to in document["edges"]]),
            "forward_only": document["forward_only"],
            "recompute": document.get("recompute", []),  # files of before have none
            "name": document["name"],
            "passes": frozenset(document["passes"]),
        }
        return Schedule(actions_of(_json_rows(document["rows"])), **known)
    except ScheduleError:
        raise
    except UsageError as error:
        raise NotationError(f"the JSON is not a whole schedule: {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise NotationError(f"the JSON is not a whole schedule: {type(error).__name__} {error}") from error


def _json_rows(rows: list[Any]) -> list[list[str | None]]:
    odd = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, list):
            odd.append(Fault(f"row {number}: {row!r} is not a list of actions"))
            continue
        for column, cell in enumerate(row, 1):
            if cell is not None and not isinstance(cell, str):
                odd.append(Fault(f"row {number}, column {column}: {cell!r} is not an action in quotes, or null"))
    if odd:
        raise NotationError(odd)
    return rows


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
