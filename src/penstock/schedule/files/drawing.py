"""The drawing of a schedule, a row for each rank and a column for each time slot; and tables of text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain, repeat

from penstock.schedule.action import Action, Op
from penstock.schedule.schedule import Schedule

IDLE = "."
# one terminal colour for each kind of compute, the same for all its microbatches; told apart
# without colour by the letter
COLORS = {Op.F: "34", Op.B: "32", Op.I: "36", Op.W: "33", Op.OVERLAP_F_B: "35", Op.OVERLAP_B_F: "35"}


def draw(schedule: Schedule, width: int | None, color: bool) -> str:
    """Draw the grid; see `Schedule.draw`."""
    slots = schedule.slots
    rows = []
    for rank in range(schedule.ranks):
        row = schedule.columns.texts(rank, IDLE)
        if len(schedule.columns.second):  # a pair is drawn without its name
            row = [text.partition(")")[0] + ")" if text.startswith("(") else text for text in row]
        rows.append(row + [IDLE] * (slots - len(row)))
    widths = [max(len(str(slot)), *map(len, column)) for slot, column in enumerate(zip(*rows, strict=True))]
    labels = [f"rank {rank}" for rank in range(schedule.ranks)]
    margin = max(map(len, labels))
    bands = []
    for first, last in _bands(widths, None if width is None else width - margin):
        sizes = widths[first:last]
        lines = [" ".join(["slot".ljust(margin), *map(str.ljust, map(str, range(first, last)), sizes)]).rstrip()]
        for rank, row in enumerate(rows):
            cells: Iterable[str] = map(str.ljust, row[first:last], sizes)
            if color:
                cells = map(_paint, cells, chain(schedule.rows[rank][first:last], repeat(None)))
            lines.append(" ".join([labels[rank].ljust(margin), *cells]).rstrip())
        bands.append("\n".join(lines))
    return "\n\n".join(bands)


def table(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """Columns as wide as their widest cell; those in `left` are aligned to the left."""
    columns = list(zip(*rows, strict=True))
    for place, column in enumerate(columns):
        width = max(map(len, column))
        columns[place] = tuple(cell.ljust(width) if place in left else cell.rjust(width) for cell in column)
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def _paint(text: str, action: Action | None) -> str:
    code = COLORS.get(action.op) if action is not None else None
    return f"\x1b[{code}m{text}\x1b[0m" if code else text


def _bands(widths: Sequence[int], room: int | None) -> Iterable[tuple[int, int]]:
    first, used = 0, 0
    for slot, size in enumerate(widths):
        if room is not None and slot > first and used + 1 + size > room:
            yield first, slot
            first, used = slot, 0
        used += 1 + size
    yield first, len(widths)
