"""The Gantt picture as SVG, and that the PNG shows the same."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image, ImageColor

from penstock.schedule import FAMILIES
from penstock.view.pictures.png import save_png
from penstock.view.pictures.svg import save_svg, svg
from penstock.view.run import Run
from tests.view.simulated import run


@pytest.mark.parametrize("name", FAMILIES)
def test_the_svg_has_each_compute_once(name: str, tmp_path: Path) -> None:
    shown = run(name)
    save_svg([shown], tmp_path / "picture.svg")
    root = ElementTree.parse(tmp_path / "picture.svg").getroot()
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    named = [title.partition(",")[0] for title in titles if "," in title]
    assert sorted(named) == sorted(str(span.action) for span in shown.timeline.spans)


def test_the_svg_escapes_what_it_is_given() -> None:
    root = ElementTree.fromstring(svg([Run('<b>&"', run("1f1b").timeline)]))
    assert root.attrib["aria-label"] == '<b>&"'


def test_the_png_shows_the_colours_where_the_svg_has_them(tmp_path: Path) -> None:
    shown = run("1f1b", 2, 2)
    save_png([shown], tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as opened:
        image = opened.convert("RGB")
    boxes = re.findall(
        r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="[\d.]+" fill="(#\w+)"><title>', svg([shown])
    )
    assert len(boxes) == 8
    for x, y, _, colour in boxes:
        assert image.getpixel((round(float(x) * 2) + 1, round(float(y) * 2) + 1)) == ImageColor.getrgb(colour)
