"""Idle time against memory, as lines for a terminal and as a page of one file."""

from __future__ import annotations

import html
from collections.abc import Sequence

from penstock.schedule import CurvePoint
from penstock.view.figures import percent

WIDTH, HEIGHT, MARGIN = 720, 360, 56
STYLE = """body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 48rem; color: #222; }
table { border-collapse: collapse; } th, td { padding: .2rem .8rem; text-align: right; }
th { border-bottom: 1px solid #999; } svg text { font: 12px system-ui, sans-serif; fill: #444; }"""


def curve_lines(points: Sequence[CurvePoint], columns: int, bar: str = "#") -> list[str]:
    """Return one line per cap: the cap, the idle share, a bar of that length, and the placement."""
    most = max((point.idle for point in points), default=0.0) or 1.0
    room = max(10, columns - 44)
    lines = [f"{'memory':>10}  {'idle':>7}  {'stages per rank':<18}"]
    for point in points:
        chosen = point.found.chosen
        kind = f"{chosen.stages_per_rank} {chosen.placement}"
        lines.append(
            f"{point.memory:>10g}  {percent(point.idle):>7}  {kind:<18}{bar * round(room * point.idle / most)}"
        )
    return lines


def curve_page(points: Sequence[CurvePoint], title: str) -> str:
    """Make a page that draws the curve and lists its points; it needs no network."""
    shown = html.escape(title)
    head = "<tr><th>memory<th>idle<th>makespan<th>lower bound<th>stages per rank<th>placement<th>peak memory</tr>"
    rows = "\n".join(
        f"<tr><td>{point.memory:g}<td>{percent(point.idle)}<td>{point.found.timeline.makespan:g}"
        f"<td>{point.found.lower_bound:g}<td>{point.found.chosen.stages_per_rank}"
        f"<td>{html.escape(point.found.chosen.placement)}<td>{max(point.found.timeline.peak_memory):g}</tr>"
        for point in points
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{shown}</title>\n<style>{STYLE}</style>\n'
        f"<h1>{shown}</h1>\n<p>The idle share of all ranks' time, against the memory that each rank may use.</p>\n"
        f"{_drawing(points)}\n<table>{head}\n{rows}\n</table>\n</html>\n"
    )


def _drawing(points: Sequence[CurvePoint]) -> str:
    """Draw the curve as an SVG: memory to the right, idle share upwards."""
    most_memory = max(point.memory for point in points)
    most_idle = max(point.idle for point in points) or 1.0

    def place(memory: float, idle: float) -> tuple[float, float]:
        across = MARGIN + (WIDTH - 2 * MARGIN) * memory / most_memory
        return across, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * idle / most_idle

    places = [place(point.memory, point.idle) for point in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#0072b2"><title>{point.memory:g}: {percent(point.idle)}</title>'
        f'</circle><text x="{x:.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{point.memory:g}</text>'
        for point, (x, y) in zip(points, places, strict=True)
    )
    ticks = "".join(
        f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        f'<text x="{MARGIN - 8}" y="{y + 4:.1f}" text-anchor="end">{percent(share * most_idle)}</text>'
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
        for y in (place(0.0, share * most_idle)[1],)
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="idle share against memory">{ticks}'
        f'<polyline points="{line}" fill="none" stroke="#0072b2" stroke-width="2"/>{dots}'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">memory of each rank</text></svg>'
    )
