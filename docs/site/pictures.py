"""The pictures of the documents, drawn by Penstock's own views. To draw them anew: `python docs/site/pictures.py`.

They are kept in docs/pictures, so that readers of the repository see them too; a test draws them and compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from penstock.schedule import FAMILIES, Costs, Span, Timeline, build, simulate
from penstock.view.figures import COLOURS
from penstock.view.pictures.svg import STYLE, svg
from penstock.view.run import Run

FOLDER = Path(__file__).resolve().parent.parent / "pictures"
RANKS, MICROBATCHES = 4, 8
LANE, BOX, TOP, UNIT = 190, 110, 44, 30  # of the sequence: sizes in pixels; UNIT is one unit of time


def pictures() -> dict[str, str]:
    """Every picture by its file name."""
    drawn = {f"{name}.svg": svg([run(name)]) for name in FAMILIES}
    drawn["first.svg"] = svg([run("1f1b"), run("zb-v")])
    drawn["memory.svg"] = svg([run("gpipe"), run("1f1b"), run("zb-h2")], memory=True)
    drawn["step.svg"] = sequence(simulate(build("1f1b", 3, 2), Costs(hop=0.5)))
    return drawn


def run(name: str) -> Run:
    """A family, priced: forward, backward for the inputs and for the weights take a rank equally long."""
    schedule = build(name, RANKS, MICROBATCHES)
    each = 1 / schedule.placement.stages_per_rank
    return Run(name, simulate(schedule, Costs(each, each, each)))


def sequence(timeline: Timeline) -> str:
    """One step as a sequence diagram: a lane per rank, time downwards, an arrow per message."""
    width, height = LANE * timeline.ranks, TOP + timeline.makespan * UNIT + 16
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}" viewBox="0 0 {width} {height:g}" '
        f'role="img" aria-label="one step">',
        f"<title>one step</title><style>{STYLE.strip()}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" class="soft"/></marker></defs>',
        f'<rect class="ground" width="{width}" height="{height:g}"/>',
    ]
    for rank in range(timeline.ranks):
        middle = LANE * (rank + 0.5)
        lines.append(f'<text x="{middle:g}" y="20" text-anchor="middle" class="bold text">rank {rank}</text>')
        lines.append(f'<rect class="idle" x="{middle - 1:g}" y="{TOP - 8}" width="2" height="{height - TOP:g}"/>')
    lines += [line for span in timeline.spans for line in _arrows(timeline, span)]
    lines += [line for span in timeline.spans for line in _box(span)]
    return "\n".join([*lines, "</svg>\n"])


def _box(span: Span) -> Iterator[str]:
    x, y, height = LANE * (span.rank + 0.5) - BOX / 2, TOP + span.start * UNIT, span.length * UNIT - 2
    words = {"F": "forward", "B": "backward"}[str(span.action.op)]
    yield f'<rect x="{x:g}" y="{y:g}" width="{BOX}" height="{height:g}" fill="{COLOURS[span.action.op]}"/>'
    label = escape(f"{span.action} {words}")
    yield f'<text x="{x + BOX / 2:g}" y="{y + height / 2:g}" text-anchor="middle" fill="#111111">{label}</text>'


def _arrows(timeline: Timeline, span: Span) -> Iterator[str]:
    for _, maker in timeline.needed_by(span):
        if maker.rank != span.rank:
            side = 1 if span.rank > maker.rank else -1
            start, end = LANE * (maker.rank + 0.5) + side * BOX / 2, LANE * (span.rank + 0.5) - side * (BOX / 2 + 1)
            top, bottom = TOP + maker.end * UNIT - 2, TOP + span.start * UNIT + 2
            place = f'x1="{start:g}" y1="{top:g}" x2="{end:g}" y2="{bottom:g}"'
            yield f'<line {place} stroke="#7a8494" stroke-width="1.4" marker-end="url(#head)"/>'


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
