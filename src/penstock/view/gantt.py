"""A Gantt chart for a terminal: a line for each rank, as wide as the terminal.

Where an action has room for its name it is written; where several share a column, the column
shows the one that has most of it. Colours are the ones of every other view; the letters are
enough without them, and idle columns are dots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.style import Style
from rich.text import Text

from penstock.schedule import Op, Span, Timeline
from penstock.view.figures import COLOURS, MEANINGS, SHARES, idle_shares, percent, time_text
from penstock.view.run import Run, common_scale

IDLE = "·"
FILL = {Op.F: "-", Op.B: "=", Op.I: "~", Op.W: "+"}  # tells a long action from idle where there is no colour
NARROWEST = 16
NARROW = 40  # columns, below which ranks are numbers and their idle shares are left out
FEW = 3  # spans in a column: of more, none is worth a name
WHOLE_NAMES = 6  # columns of a mean span; in less, the stage is left out of every name
MOSTLY = 0.4  # Share of a column: less is shown as idle.


def gantt(runs: Sequence[Run], width: int = 100, ascii_only: bool = False) -> Text:
    """Draw all runs, one below the other, on one scale where they have one unit."""
    shared = common_scale(runs)
    lines = [line for run in runs for line in _run(run, max(width, NARROWEST), shared, ascii_only)]
    return Text("\n").join([*lines[:-1], legend(runs, width)]) if lines else Text()


def legend(runs: Sequence[Run], width: int) -> Text:
    """Explain the colours and letters that occur; a line holds as many as it has room for."""
    there = {span.action.op for run in runs for span in run.timeline.spans}
    text, used = Text(), 0
    for op, colour in COLOURS.items():
        if op in there:
            meaning = f" {MEANINGS[op]}  "
            if used and used + 3 + len(meaning.rstrip()) > width:
                text.append("\n")
                used = 0
            used += 3 + len(meaning)
            text.append(f" {op.name[0]} ", Style(color="black", bgcolor=colour)).append(meaning)
    return text


def _run(run: Run, width: int, shared: float, ascii_only: bool) -> Iterator[Text]:
    timeline = run.timeline
    name = "" if width < NARROW else "rank "
    margin = len(f"{name}{timeline.ranks - 1}") + 1
    whole = shared or timeline.makespan
    columns = width - margin - (len(" 100.0 %") if name else 0)
    idle = idle_shares(timeline)
    kind = "measured" if timeline.measured else "simulated"
    yield Text(f"{run.label}: {run.sizes}, {kind}", "bold")
    for rank, (row, share) in enumerate(zip(timeline.by_rank, idle, strict=True)):
        line = Text(f"{name}{rank}".ljust(margin)).append_text(_row(row, timeline, columns, whole, ascii_only))
        yield line.append(f" {percent(share.total):>7}", "dim") if name else line
    yield Text(" " * margin + _axis(columns, whole, timeline.unit) + ("    idle" if name else ""), "dim")
    mean = [sum(parts) / len(idle) for parts in zip(*idle, strict=True)]
    parts = ", ".join(f"{name} {percent(part)}" for name, part in zip(SHARES, mean, strict=True) if part >= 0.0005)
    length = time_text(timeline.makespan, timeline.unit)
    peak = f"; a rank holds at most {run.memory_text}" if run.memory_text else ""
    yield Text(f"makespan {length}; idle {percent(timeline.bubble)}{f' ({parts})' if parts else ''}{peak}")
    yield Text()


def _row(row: Sequence[Span], timeline: Timeline, columns: int, whole: float, ascii_only: bool) -> Text:
    cells = _cells(row, timeline, columns, whole)
    mean = sum(timeline.busy) / max(len(timeline.spans), 1)
    names = mean * columns >= WHOLE_NAMES * whole
    text = Text()
    column = 0
    while column < columns:
        end = column + 1
        while end < columns and cells[end] == cells[column]:
            end += 1
        owner = cells[column]
        if owner is None:
            text.append(("." if ascii_only else IDLE) * (end - column), "dim")
        elif isinstance(owner, Span):
            text.append(_label(owner, end - column, names), _style(owner.action.op))
        else:
            text.append(owner.name[0] * (end - column), _style(owner))
        column = end
    return text


def _cells(row: Sequence[Span], timeline: Timeline, columns: int, whole: float) -> list[Span | Op | None]:
    """Return what each column shows: the span that has most of it, of many spans their op, None where it is mostly
    idle.
    """
    size = whole / columns or 1.0
    largest: list[tuple[float, Span | None]] = [(0.0, None)] * columns
    counts = [0] * columns
    by_op: list[Counter[Op]] = [Counter() for _ in range(columns)]
    for span in row:
        first, last = (span.start - timeline.start) / size, (span.end - timeline.start) / size
        for column in range(int(first), min(columns, int(last) + 1)):
            share = min(last, column + 1) - max(first, column)
            by_op[column][span.action.op] += share  # type: ignore[assignment]
            counts[column] += 1
            if share > largest[column][0]:
                largest[column] = (share, span)
    cells: list[Span | Op | None] = []
    for column, ((_, owner), ops) in enumerate(zip(largest, by_op, strict=True)):
        if sum(ops.values()) < MOSTLY:
            cells.append(None)
        else:
            cells.append(owner if counts[column] <= FEW else ops.most_common(1)[0][0])
    return cells


def _style(op: Op) -> Style:
    return Style(color="black", bgcolor=COLOURS.get(op, "#999999"))


def _label(span: Span, room: int, names: bool) -> str:
    """Return the action's name, or its letter and microbatch; its letter alone where no more fits."""
    action = span.action
    fill = FILL.get(action.op, "#")
    short = "".join(f"{part.op}{part.microbatch}" for part in action.parts())  # F3B1 for a pair
    for name in (str(action), short) if names else (short,):
        if len(name) < room or (len(name) == room and not names):
            return name.ljust(room, fill)
    return action.op.name[0].ljust(room, fill)


def _axis(columns: int, whole: float, unit: str) -> str:
    end = time_text(whole, unit)
    middle = time_text(whole / 2, unit)
    if columns < len(middle) + 2 * len(end) + 2:
        return "0" + end.rjust(columns - 1)
    return "0" + middle.center(columns - 1 - len(end)) + end
