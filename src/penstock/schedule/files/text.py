"""A schedule as text: rows that people write, the CSV dialect that torch reads, and JSON.

CSV is what people carry between libraries: one row a rank, blank cells for idle slots. It
cannot say how many microbatches were meant or which passes have run, so those are read off
the actions. JSON holds the whole value and gives back an equal one.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from penstock import writing
from penstock.errors import Fault, NotationError, ScheduleError, UsageError
from penstock.schedule.action import Action, Op, parse
from penstock.schedule.files.drawing import IDLE
from penstock.schedule.files.facts import check_facts, taken
from penstock.schedule.files.reading import MOST_STAGES, parse_json, read_file
from penstock.schedule.placement import Placement
from penstock.schedule.proof.certificate import LINKS, RULES, Certificate
from penstock.schedule.proof.shape import shape_faults
from penstock.schedule.schedule import Schedule
from penstock.schedule.seen import PASSES, actions_of, skips_seen
from penstock.schedule.topology import Topology

FORMAT = 1


def read_text(text: str | Iterable[str]) -> list[list[Action | None]]:
    """Read rows from text lines, or from a drawing, wrapped or not."""
    lines = text.splitlines() if isinstance(text, str) else list(text) if isinstance(text, Iterable) else [text]
    odd = [line for line in lines if not isinstance(line, str)]
    if odd:
        raise UsageError(f"rows of text are lines such as '0F0 0F1 . 0B0', one for each rank; got {odd[0]!r}")
    rows: list[list[str]] = []  # Texts of cells.
    places: list[list[tuple[int, int]]] = []  # Line and column of each of these cells.
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
    """Read rows in which some cells, or all, are text."""

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
    text = {".csv": to_csv, ".json": to_json}[file_kind(path)](schedule)
    writing.save(path, text)


def load(path: str | PathLike[str], facts: dict[str, Any], check: bool = True) -> Schedule:
    """Read `.csv` or `.json`, and see whether it is for the stated `facts`; all faults at once."""
    path = Path(path)
    kind = file_kind(path)
    text = read_file(path)
    if kind == ".csv":
        schedule = from_csv(text, taken(facts))
    else:
        taken(facts)
        schedule = from_json(text, certified=check)
    if schedule.stages > MOST_STAGES:
        raise ScheduleError(f"{path.name} has {schedule.stages:,} stages; at most {MOST_STAGES:,} are read")
    found = check_facts(schedule, facts, whole=kind == ".json")
    if check:
        found += [fault for fault in shape_faults(schedule) if fault not in found]
    if found:
        raise ScheduleError(found)
    return schedule


def file_kind(path: Path) -> str:
    """Return .csv or .json, by the name of the file; refuse anything else."""
    kind = path.suffix.lower()
    if kind not in (".csv", ".json"):
        raise UsageError(f"{path.name}: the name of a schedule's file ends in .csv or .json, so that its form is known")
    return kind


def to_csv(schedule: Schedule) -> str:
    """Write one row a rank, blank cells for idle slots. The edges must be those that can be read off the rows."""
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
    return cells_to_csv(schedule.columns.texts(rank, "") for rank in range(schedule.ranks))


def rows_to_csv(rows: Iterable[Iterable[Action | None]]) -> str:
    """Write the cells alone, whatever they mean."""
    return cells_to_csv([("" if action is None else str(action)) for action in row] for row in rows)


def cells_to_csv(rows: Iterable[Iterable[str]]) -> str:
    """Write rows of text as CSV."""
    out = io.StringIO()
    csv.writer(out).writerows(rows)
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


def to_json(schedule: Schedule, **more: object) -> str:
    """Write the whole value, with all facts about it."""
    document = {
        "penstock_schedule": FORMAT,
        "name": schedule.name,
        "placement": list(schedule.placement),
        "microbatches": schedule.microbatches,
        "edges": [list(edge) for edge in schedule.topology.edges],
        "forward_only": schedule.forward_only,
        "recompute": sorted(schedule.recompute),
        "passes": sorted(schedule.passes),
        **more,
    }
    if schedule.certificate is not None:
        document["certificate"] = asdict(schedule.certificate)
    head = json.dumps(document, indent=2)[:-2]
    rows = (schedule.columns.texts(rank, "") for rank in range(schedule.ranks))
    lines = ",\n".join(f"    {json.dumps([text or None for text in row])}" for row in rows)
    return f'{head},\n  "rows": [\n{lines}\n  ]\n}}\n'


def from_json(text: str, *, certified: bool = True) -> Schedule:
    """Read what `to_json` wrote. With `certified`, a certificate that is for another schedule is refused."""
    document = parse_json(text)
    if not isinstance(document, dict) or document.get("penstock_schedule") != FORMAT:
        raise NotationError(f'a schedule in JSON has "penstock_schedule": {FORMAT} at its top')
    missing = [key for key in _KEYS if type(document.get(key)) is not _KEYS[key]]
    if not missing and not PASSES.issuperset(map(str, document["passes"])):
        missing = ["passes"]
    if not missing and not document["name"].isprintable():  # The name is shown on terminals.
        missing = ["name"]
    if missing:
        raise NotationError([Fault(f"no complete schedule in JSON: {key!r} is missing or wrong") for key in missing])
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
        schedule = Schedule(actions_of(_json_rows(document["rows"])), **known)
        if certified and "certificate" in document:
            _keep_certificate(schedule, document["certificate"])
        return schedule
    except ScheduleError:
        raise
    except UsageError as error:
        raise NotationError(f"the JSON is not a complete schedule: {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise NotationError(f"the JSON is not a complete schedule: {type(error).__name__} {error}") from error


def _keep_certificate(schedule: Schedule, written: Any) -> None:
    """Check the certificate of a file, and keep it. One by other rules says nothing, and is dropped."""
    kinds = {"digest": str, "proved": list, "rules": int}
    found = {name: type(value) for name, value in written.items()} if isinstance(written, dict) else {}
    # Files were written so before there were several kinds of links.
    older = found == kinds and written["rules"] < RULES
    if not older and (found != {**kinds, "links": str} or written["links"] not in LINKS):
        raise NotationError("the certificate of the file is not complete; verify the schedule, and save it again")
    if written["rules"] == RULES:
        certificate = Certificate(**{**written, "proved": tuple(written["proved"])})
        certificate.check(schedule)
        schedule.__dict__["certificate"] = certificate


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
