"""Pages of one file: assets of the package put into a frame, with data that no HTML parser can mistake for markup."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from penstock.view.figures import COLOURS, MEANINGS, shades

__all__ = ["SHARED", "asset", "embedded", "filled", "ops"]

# Every page draws with these.
SHARED = ("runs.js", "drawing.js", "gantt.js", "memory.js", "scatter.js", "navigate.js", "toolbar.js")


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
