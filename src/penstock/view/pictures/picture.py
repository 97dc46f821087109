"""A Gantt picture for documents, as a list of shapes: `svg` and `png` draw the same list.

The picture does not move, so it says in itself what a reader needs: names, a time axis, the
idle share of each rank and what the colours mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.schedule import Span, Timeline
from penstock.view.figures import COLOURS, MEANINGS, idle_shares, in_flight, number, percent, time_text
from penstock.view.run import Run, common_scale

WIDTH = 960
MARGIN, TOP, ROW, GAP, LETTER = 16, 14, 24, 3, 6.6
HELD = 20  # the height of a rank's activations below its row, where they are shown
GUTTER, IDLE_COLUMN = 58, 56
TICKS = 8


class Rectangle(NamedTuple):
    """A filled rectangle; `colour` is a name of the theme or a colour of an op."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str = ""  # what a viewer shows when it is pointed at


class Words(NamedTuple):
    """A line of text; (x, y) is the left, middle or right end of its middle line."""

    x: float
    y: float
    text: str
    colour: str = "text"
    anchor: str = "start"
    bold: bool = False


class Picture(NamedTuple):
    """Everything, in drawing order."""

    width: float
    height: float
    title: str
    shapes: tuple[Rectangle | Words, ...]


def picture(runs: Sequence[Run], width: float = WIDTH, memory: bool = False) -> Picture:
    """Draw all runs, one below the other, on one scale where they have one unit.

    With `memory`, each rank's row has what it holds below it, as bars, in whole-rank microbatches.
    """
    shared = common_scale(runs)
    most = max((run.peak_memory or 0.0 for run in runs), default=0.0) if memory else 0.0
    shapes: list[Rectangle | Words] = []
    y = float(TOP)
    for run in runs:
        shapes += _run(run, y, width, shared, most)
        y += 26 + run.timeline.ranks * (ROW + (HELD if most else 0)) + 34
    shapes += _legend(runs, y)
    return Picture(width, y + 24, " / ".join(run.label for run in runs), tuple(shapes))


def _run(run: Run, y: float, width: float, shared: float, most: float) -> Iterator[Rectangle | Words]:
    timeline = run.timeline
    whole = shared or timeline.makespan or 1.0
    left, plot = MARGIN + GUTTER, width - 2 * MARGIN - GUTTER - IDLE_COLUMN
    facts = f"makespan {time_text(timeline.makespan, timeline.unit)}, idle {percent(timeline.bubble)}"
    yield Words(MARGIN, y + 8, f"{run.label}: {run.sizes}", bold=True)
    yield Words(width - MARGIN, y + 8, facts, "soft", "end")
    y += 26
    for rank, (row, idle) in enumerate(zip(timeline.by_rank, idle_shares(timeline), strict=True)):
        yield Words(MARGIN, y + (ROW - GAP) / 2, f"rank {rank}", "soft")
        yield Rectangle(left, y, plot, ROW - GAP, "idle")
        for span in row:
            yield from _span(span, timeline, left, plot / whole, y)
        yield Words(width - MARGIN, y + (ROW - GAP) / 2, percent(idle.total), "soft", "end")
        y += ROW
        if most:
            yield from _held(timeline, rank, left, plot / whole, y, most)
            y += HELD
    for tick in range(TICKS + 1):
        x = left + plot * tick / TICKS
        anchor = "start" if tick == 0 else "end" if tick == TICKS else "middle"
        yield Rectangle(x - 0.5, y, 1, 5, "soft")
        if tick % 2 == 0:
            yield Words(x, y + 14, time_text(whole * tick / TICKS, timeline.unit), "soft", anchor)


def _held(
    timeline: Timeline, rank: int, left: float, scale: float, y: float, most: float
) -> Iterator[Rectangle | Words]:
    """Draw what a rank holds over time, as bars whose full height is the most that any rank holds."""
    each = len(timeline.schedule.placement.stages_of(rank))
    changes = in_flight(timeline, rank)
    ends = [time for time, _ in changes[1:]] + [timeline.start + timeline.makespan]
    for (start, count), end in zip(changes, ends, strict=True):
        height = (HELD - 2 * GAP) * count / each / most
        if count:
            place = left + (start - timeline.start) * scale
            yield Rectangle(
                place,
                y + HELD - 2 * GAP - height,
                (end - start) * scale,
                height,
                "soft",
                f"{number(count / each)} held",
            )
    peak = number(timeline.peak_activations[rank] / each)
    yield Words(left - 8, y + HELD / 2 - GAP, f"{peak} held", "soft", "end")


def _span(span: Span, timeline: Timeline, left: float, scale: float, y: float) -> Iterator[Rectangle | Words]:
    x, width = left + (span.start - timeline.start) * scale, span.length * scale
    gap = 1.0 if width > 4 else 0.0
    colour = COLOURS.get(span.action.op, "#999999")
    length = time_text(span.length, timeline.unit)
    yield Rectangle(x, y, width - gap, ROW - GAP, colour, f"{span.action}, {length}")
    action = span.action
    for name in (str(action), f"{action.op}{action.microbatch}", f"{action.microbatch}"):
        if len(name) * LETTER + 2 <= width - gap and action.pair is None:
            yield Words(x + (width - gap) / 2, y + (ROW - GAP) / 2, name, "#111111", "middle")
            return


def _legend(runs: Sequence[Run], y: float) -> Iterator[Rectangle | Words]:
    there = {span.action.op for run in runs for span in run.timeline.spans}
    x = float(MARGIN)
    for op, colour in COLOURS.items():
        if op in there:
            letter = "FB" if op.is_pair else op.name
            yield Rectangle(x, y, 18, 16, colour)
            yield Words(x + 9, y + 8, letter, "#111111", "middle", bold=True)
            yield Words(x + 24, y + 8, MEANINGS[op], "soft")
            x += 24 + len(MEANINGS[op]) * LETTER + 22
