"""The picture as SVG: text stays text, it is sharp at any size, and it follows the reader's dark mode."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from os import PathLike

from penstock import writing
from penstock.view.figures import printable
from penstock.view.pictures.picture import Picture, Rectangle, Words, picture
from penstock.view.run import Run

STYLE = """
text{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;dominant-baseline:central}
.bold{font-weight:700}.ground{fill:#fff}.text{fill:#15181d}.soft{fill:#596273}.idle{fill:#eceff3}
@media(prefers-color-scheme:dark){.ground{fill:#12151a}.text{fill:#e8ebf0}.soft{fill:#9ea8b8}.idle{fill:#222831}}
"""


def save_svg(runs: Sequence[Run], path: str | PathLike[str]) -> None:
    writing.save(path, svg(runs))


def svg(runs: Sequence[Run], memory: bool = False) -> str:
    return render(picture(runs, memory=memory))


def render(drawn: Picture) -> str:
    size = f'width="{drawn.width:g}" height="{drawn.height:g}" viewBox="0 0 {drawn.width:g} {drawn.height:g}"'
    name = _safe(drawn.title)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{name}">',
        f"<title>{name}</title><style>{STYLE.strip()}</style>",
        f'<rect class="ground" width="{drawn.width:g}" height="{drawn.height:g}"/>',
        *(_box(shape) if isinstance(shape, Rectangle) else _words(shape) for shape in drawn.shapes),
        "</svg>\n",
    ]
    return "\n".join(lines)


def _safe(text: str) -> str:
    return escape(printable(text))


def _paint(colour: str) -> str:
    return f'fill="{colour}"' if colour.startswith("#") else f'class="{colour}"'


def _box(box: Rectangle) -> str:
    place = f'x="{box.x:.2f}" y="{box.y:.2f}" width="{max(box.width, 0.1):.2f}" height="{box.height:.2f}"'
    title = f"<title>{_safe(box.title)}</title>" if box.title else ""
    return f"<rect {place} {_paint(box.colour)}>{title}</rect>" if title else f"<rect {place} {_paint(box.colour)}/>"


def _words(words: Words) -> str:
    colour = _paint(words.colour)
    if words.bold:
        colour = colour.replace('class="', 'class="bold ') if "class" in colour else f'{colour} class="bold"'
    anchor = "" if words.anchor == "start" else f' text-anchor="{words.anchor}"'
    return f'<text x="{words.x:.2f}" y="{words.y:.2f}"{anchor} {colour}>{_safe(words.text)}</text>'
