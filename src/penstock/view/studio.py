"""The studio: a page to build, compare, move and prove schedules in, as one HTML file without network.

The page has the rules of schedules once more, in JavaScript, because it must answer while a slider moves. What must
precede what is not among them: that table is made here from the one dependency rule. The rest is held to Python's
rules by a test, which compares schedules, times, bounds and faults in a thousand random cases.
"""

from __future__ import annotations

from os import PathLike
from typing import Any, NamedTuple
from urllib.parse import urlencode

from penstock import writing
from penstock.errors import UsageError
from penstock.schedule import FAMILIES, Op, Schedule
from penstock.schedule.dependencies import makes, needs
from penstock.schedule.topology import Topology
from penstock.view.page import SHARED, asset, embedded, filled, ops

RULES = tuple(f"studio/{name}.js" for name in ("schedule", "proof", "builders", "rhythm", "bound", "files", "search"))
SCRIPTS = (*RULES, *SHARED, "studio/picture.js", "studio/state.js", "studio/edit.js", "studio/studio.js")


LETTERS = "ab"  # They name the two schedules in the address of the page.
LIMITS = {"ranks": 256, "microbatches": 1024, "size": 40_000}  # size: stages times microbatches, which are all drawn


class Shown(NamedTuple):
    """What the page shows first: up to two families or schedules, and sizes; what is left out is the page's own."""

    schedules: tuple[str | Schedule, ...] = ()
    ranks: int | None = None
    microbatches: int | None = None

    def address(self) -> str:
        """Return the part after `#` of the page's address that shows the same."""
        _check("ranks", self.ranks)
        _check("microbatches", self.microbatches)
        if self.ranks is not None and self.microbatches is not None:
            _check("size", self.ranks * self.microbatches)
        words: dict[str, object] = {"r": self.ranks, "m": self.microbatches}
        for letter, entry in zip(LETTERS, self.schedules, strict=False):
            if isinstance(entry, str):
                words[letter] = entry
                words[f"{letter}v"] = FAMILIES[entry].stages_per_rank
            else:
                words |= {f"{letter}{name}": value for name, value in _own(entry).items()}
        return urlencode({name: value for name, value in words.items() if value is not None})


def _own(schedule: Schedule) -> dict[str, object]:
    """Describe a schedule of computes in the words of the page's address."""
    if schedule.topology != Topology.chain(schedule.stages):
        raise UsageError("the studio knows chains of stages; this schedule has stages that skip others")
    _check("ranks", schedule.ranks)
    _check("size", schedule.stages * schedule.microbatches)
    cells = ([cell.parts() for cell in row if cell is not None] for row in schedule.rows)
    rows = "_".join(".".join("-".join(map(str, parts)) for parts in row) for row in cells)
    return {
        "": "own",
        "rows": rows,
        "on": ".".join(map(str, schedule.placement)),
        "m": schedule.microbatches,
        "name": schedule.name or "own",
        "f": 1 if schedule.forward_only else None,
    }


def _check(name: str, value: int | None) -> None:
    if value is not None and value > LIMITS[name]:
        what = "stages times microbatches" if name == "size" else name
        raise UsageError(f"the studio draws at most {LIMITS[name]:,} {what}, not {value:,}; penstock view takes more")


def save_studio(path: str | PathLike[str], shown: Shown | None = None) -> None:
    """Write the studio to a file.

    Args:
        path: The file to write.
        shown: What it shows first.
    """
    writing.save(path, studio_page(shown))


def studio_page(shown: Shown | None = None) -> str:
    """Make the studio as one HTML page."""
    return filled(
        "studio/studio.html",
        STYLE=asset("page.css") + asset("studio/studio.css"),
        DATA=embedded(studio_data(shown)),
        SCRIPT="\n".join(map(asset, SCRIPTS)),
    )


def studio_data(shown: Shown | None = None) -> dict[str, Any]:
    """Return what the page needs: the dependency rule as a table, families, looks of ops, and what to show first."""
    families = {
        name: {"layout": entry.layout, "stages": entry.stages_per_rank, "summary": entry.summary}
        for name, entry in FAMILIES.items()
    }
    begin = (shown or Shown()).address()
    return {"rules": _rules(), "families": families, "ops": ops(), "limits": LIMITS, "begin": begin}


def _rules() -> dict[str, Any]:
    """Return the dependency rule of a chain: by compute, (value, stages further on) it needs, and what it makes."""
    inside, chain = 1, Topology.chain(3)
    computes = [op for op in Op if op.is_compute]
    return {
        "needs": [[[value, stage - inside] for value, stage in needs(op, inside, chain)] for op in computes],
        "makes": [list(makes(op)) for op in computes],
    }
