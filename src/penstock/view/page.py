"""The page: one HTML file with everything in it, to be opened from a disk, mailed or put beside a report.

The file holds the drawing code, the styles and the data of each run; it asks no network for anything,
and its own policy forbids it to. Python says what is true (who waited for whom, what is in
flight, what is idle and why) and the script in it only draws: no rule is stated twice.

Times are whole numbers of ticks, ten million to a makespan, which is finer than any screen and
keeps a hundred thousand spans in a few megabytes.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from os import PathLike
from typing import Any

from penstock import writing
from penstock.schedule import Op, Timeline
from penstock.view.account import Account, account
from penstock.view.curve import Curve
from penstock.view.figures import COLOURS, MEANINGS, idle_shares, in_flight, shades, time_text
from penstock.view.recorded import RecordedSteps
from penstock.view.run import Run

# Every page draws with these.
SHARED = ("runs.js", "drawing.js", "gantt.js", "memory.js", "scatter.js", "navigate.js", "toolbar.js")
TICKS = 10_000_000
SCRIPTS = (*SHARED, "tables.js", "page.js")
PLAIN = (Op.F, Op.B, Op.I, Op.W)
MOST_ACCOUNTED = 200_000  # spans; the books of more take longer than anybody waits for a page


def save_page(
    runs: Sequence[Run],
    path: str | PathLike[str],
    title: str | None = None,
    *,
    notes: Sequence[str] = (),
    curve: Curve | None = None,
    recordings: RecordedSteps | None = None,
) -> None:
    """Write the page of runs side by side to a file."""
    text = page(runs, title, notes=notes, curve=curve, recordings=recordings)
    writing.save(path, text)


def page(
    runs: Sequence[Run],
    title: str | None = None,
    *,
    notes: Sequence[str] = (),
    curve: Curve | None = None,
    recordings: RecordedSteps | None = None,
) -> str:
    """Make the page of runs side by side.

    `notes` come first. The loss of a training run and its recorded steps, of which the first run is one, have pictures
    of their own.
    """
    return filled(
        "page.html",
        TITLE=html.escape(title or " / ".join(run.label for run in runs)),
        STYLE=asset("page.css"),
        NOTES="".join(f"<li>{html.escape(note)}</li>" for note in notes),
        CURVE=_loss(curve),
        DATA=embedded(page_data(runs, recordings)),
        SCRIPT="\n".join(map(asset, SCRIPTS)),
    )


def _loss(curve: Curve | None) -> str:
    drawn = "" if curve is None else curve.svg()
    if not drawn:
        return ""
    keys = "".join(
        f'<li><span class="swatch {kind}"></span>{words}</li>'
        for kind, words, points in (
            ("training", "training", curve and curve.training),
            ("validation", "validation, the lowest as a ring", curve and curve.validation),
        )
        if points
    )
    head = '<h2 id="loss-title">Loss</h2>'
    return f'<section aria-labelledby="loss-title" id="loss">{head}<ul class="keys">{keys}</ul>{drawn}</section>'


def page_data(runs: Sequence[Run], recordings: RecordedSteps | None = None) -> dict[str, Any]:
    """Return everything that the page needs of the runs."""
    steps = recordings.document() if recordings is not None and len(recordings.steps) > 1 else None
    return {"ops": ops(), "runs": [_run(run) for run in runs], "steps": steps}


def _run(run: Run) -> dict[str, Any]:
    timeline = run.timeline
    tick = timeline.makespan / TICKS or 1.0
    schedule = timeline.schedule
    path = {id(span) for span in timeline.critical_path}
    places = {id(span): position for row in timeline.by_rank for position, span in enumerate(row)}
    document: dict[str, Any] = {
        "label": run.label,
        "kind": "measured" if timeline.measured else "simulated",
        "unit": timeline.unit,
        "sizes": [schedule.ranks, schedule.stages, schedule.microbatches],
        "tick": tick,
        "makespan": timeline.makespan,
        "idle": timeline.bubble,
        "activation": run.activation,
        "rows": [
            _row(timeline, rank, tick, path, places, idle)
            for rank, idle in zip(range(timeline.ranks), idle_shares(timeline), strict=True)
        ],
    }
    if timeline.measured and len(timeline.spans) <= MOST_ACCOUNTED:
        books = account(timeline)
        document["account"] = {
            "advice": books.guarded_advice,
            "path": [[name, time_text(time, timeline.unit)] for name, time in books.path_shares().items()],
            "names": _names(books),
            "ranks": [
                {
                    "rank": entry.rank,
                    "whole": time_text(entry.whole, timeline.unit),
                    "parts": [(name, time / entry.whole) for name, time in entry.parts().items() if time],
                }
                for entry in books.ranks
            ],
        }
    return document


def _names(books: Account) -> list[str]:
    """Return the parts that any rank has, in the order of the accountant's sum."""
    there = {name for entry in books.ranks for name, time in entry.parts().items() if time}
    waits = [f"wait for rank {rank}" for rank in range(len(books.ranks))]
    order = [*(op.name for op in PLAIN), *waits, "sends", "reduction", "optimizer", "host"]
    return [name for name in order if name in there]


def _row(
    timeline: Timeline, rank: int, tick: float, path: set[int], places: dict[int, int], idle: Sequence[float]
) -> dict[str, Any]:
    spans = timeline.by_rank[rank]
    begin = timeline.start
    own = {stage: place for place, stage in enumerate(timeline.schedule.placement.stages_of(rank))}
    causes = [timeline.waited_for(span) for span in spans]
    memory = in_flight(timeline, rank)
    sends = [span for span in timeline.chores if span.rank == rank]
    return {
        "rank": rank,
        "stages": len(own),
        "idle": list(idle),
        "op": [span.action.op.name for span in spans],
        "stage": [span.action.stage for span in spans],
        "chunk": [own.get(span.action.stage, 0) for span in spans],
        "microbatch": [-1 if span.action.microbatch is None else span.action.microbatch for span in spans],
        "names": {place: str(span.action) for place, span in enumerate(spans) if span.action.op not in PLAIN},
        "start": [round((span.start - begin) / tick) for span in spans],
        "length": [round(span.length / tick) for span in spans],
        "wait": [round(span.wait / tick) for span in spans],
        "peer": [-1 if cause is None else cause.rank for cause in causes],
        "cause": [-1 if cause is None else places[id(cause)] for cause in causes],
        "critical": [place for place, span in enumerate(spans) if id(span) in path],
        "memory": [[round((time - begin) / tick) for time, _ in memory], [level for _, level in memory]],
        "sends": [
            [round((span.start - begin) / tick) for span in sends],
            [round(span.length / tick) for span in sends],
            [str(span.action) for span in sends],
        ],
    }


def asset(name: str) -> str:
    """Return the text of a file that comes with the package."""
    return resources.files("penstock.view").joinpath("assets", *name.split("/")).read_text(encoding="utf-8")


def embedded(document: object) -> str:
    """Write JSON that can stand inside of a page."""
    text = json.dumps(document, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def filled(frame: str, **parts: str) -> str:
    """Fill in what stands between the `@@` signs of a frame; what is filled in is never looked at again."""
    pieces = asset(frame).split("@@")
    return "".join(parts[piece] if odd % 2 else piece for odd, piece in enumerate(pieces))


def ops() -> dict[str, dict[str, Any]]:
    """Return how each op looks: its letter, meaning, and colours by the stage of a rank."""
    return {
        op.name: {"letter": op.name, "meaning": MEANINGS[op], "shades": shades(COLOURS[op]), "pair": op.is_pair}
        for op in COLOURS
    }
