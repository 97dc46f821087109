"""The picture as PNG, drawn by Pillow at twice its size, so that text is crisp on any screen."""

from __future__ import annotations

import io
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from penstock import writing
from penstock.view.figures import printable
from penstock.view.pictures.picture import Picture, Rectangle, picture
from penstock.view.run import Run

if TYPE_CHECKING:
    from PIL.Image import Image

SCALE = 2
LETTERS = 11  # pixels high, before scaling
THEME = {"ground": "#ffffff", "text": "#15181d", "soft": "#596273", "idle": "#eceff3"}
ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}


def save_png(runs: Sequence[Run], path: str | PathLike[str]) -> None:
    image = io.BytesIO()
    render(picture(runs)).save(image, format="PNG", dpi=(144, 144))
    writing.save(path, image.getvalue())


def render(drawn: Picture) -> Image:
    from PIL import Image, ImageDraw, ImageFont  # Imported here only: every command would load it.

    image = Image.new("RGB", (round(drawn.width * SCALE), round(drawn.height * SCALE)), THEME["ground"])
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(LETTERS * SCALE)
    for shape in drawn.shapes:
        colour = THEME.get(shape.colour, shape.colour)
        x, y = round(shape.x * SCALE), round(shape.y * SCALE)
        if isinstance(shape, Rectangle):
            right, bottom = round((shape.x + shape.width) * SCALE) - 1, round((shape.y + shape.height) * SCALE) - 1
            draw.rectangle((x, y, max(x, right), max(y, bottom)), fill=colour)
        else:
            text = printable(shape.text)
            draw.text((x, y), text, colour, font, ANCHORS[shape.anchor], stroke_width=0.5 if shape.bold else 0)
    return image
