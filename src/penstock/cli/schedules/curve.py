"""`penstock search --curve`: idle time against memory, as text, as JSON and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import writing
from penstock.cli.output import fold, terminal_width, write, write_json, writes
from penstock.errors import UsageError
from penstock.schedule import CurvePoint
from penstock.view.pictures.memory_curve import curve_lines, curve_page

BAR = "\N{FULL BLOCK}"
PIPE_WIDTH = 100


def refuse_with_curve(given: dict[str, object]) -> None:
    """Refuse options that are about one schedule, since a curve has many."""
    for option, value in given.items():
        if value:
            raise UsageError(f"{option} is for one schedule, and --curve draws many; leave one of them out")


def show_curve(points: Sequence[CurvePoint], ranks: int, microbatches: int, html: Path | None, as_json: bool) -> None:
    """Write the curve as text or JSON, and as a page where one is asked for."""
    title = f"{ranks} ranks, {microbatches} microbatches: idle time against memory"
    if html is not None:
        writing.save(html, curve_page(points, title))
    if as_json:
        write_json({"ranks": ranks, "microbatches": microbatches, "points": [_document(point) for point in points]})
        return
    columns = terminal_width() or PIPE_WIDTH
    write(fold(title, columns))
    write("\n".join(curve_lines(points, columns, BAR if writes(BAR) else "#")))
    if html is not None:
        write(f"saved to {html}")


def _document(point: CurvePoint) -> dict[str, Any]:
    found = point.found
    return {
        "memory": point.memory,
        "idle_share": point.idle,
        "makespan": found.timeline.makespan,
        "lower_bound": found.lower_bound,
        "peak_memory": list(found.timeline.peak_memory),
        "stages_per_rank": found.chosen.stages_per_rank,
        "placement": found.chosen.placement,
    }
