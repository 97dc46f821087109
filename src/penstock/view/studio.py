"""The studio: a page to build, compare, move and prove schedules in, as one HTML file without network.

The page has the rules of schedules once more, in JavaScript, because it must answer while a slider moves. What must
precede what is not among them: that table is made here from the one dependency rule. The rest is held to Python's
rules by a test, which compares schedules, times, bounds and faults in a thousand random cases.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from penstock.schedule import FAMILIES, Op
from penstock.schedule.dependencies import makes, needs
from penstock.schedule.topology import Topology
from penstock.view.document import SHARED, asset, embedded, filled, ops

__all__ = ["RULES", "SCRIPTS", "save_studio", "studio", "studio_data"]

RULES = tuple(f"studio/{name}.js" for name in ("schedule", "proof", "builders", "rhythm", "bound", "files", "search"))
SCRIPTS = (*RULES, *SHARED, "studio/picture.js", "studio/state.js", "studio/edit.js", "studio/studio.js")


def save_studio(path: str | PathLike[str]) -> None:
    """Write the studio to a file.

    Args:
        path: The file to write.
    """
    Path(path).write_text(studio(), encoding="utf-8")


def studio() -> str:
    """The studio as one HTML page."""
    return filled(
        "studio/studio.html",
        STYLE=asset("page.css") + asset("studio/studio.css"),
        DATA=embedded(studio_data()),
        SCRIPT="\n".join(map(asset, SCRIPTS)),
    )


def studio_data() -> dict[str, Any]:
    """What the page is told: the dependency rule as a table, the families, and how ops look."""
    families = {
        name: {"layout": entry.layout, "stages": entry.stages_per_rank, "summary": entry.summary}
        for name, entry in FAMILIES.items()
    }
    return {"rules": _rules(), "families": families, "ops": ops()}


def _rules() -> dict[str, Any]:
    """The dependency rule of a chain: by compute, (value, stages further on) that it needs, and values that it makes."""
    inside, chain = 1, Topology.chain(3)
    computes = [op for op in Op if op.is_compute]
    return {
        "needs": [[[value, stage - inside] for value, stage in needs(op, inside, chain)] for op in computes],
        "makes": [list(makes(op)) for op in computes],
    }
