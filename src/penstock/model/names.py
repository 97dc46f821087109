"""Names of modules and parameters: dotted, and in `split_at` also `name#2` for the second time that one is used."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def dotted_name(*parts: str) -> str:
    """Join the dotted name of something inside a module; the model itself is called ``."""
    return ".".join(filter(None, parts))


def name_and_use(place: str) -> tuple[str, int]:
    """Return the name, and which of its uses; the first where none is stated."""
    name, mark, use = place.rpartition("#")
    return (name, int(use)) if mark and use.isdecimal() and int(use) > 0 else (place, 1)


def similar_names(name: str, names: Iterable[str], these: str) -> str:
    """Write the end of an error about an unknown name: names that look like it, or else some that exist."""
    known = list(dict.fromkeys(names))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"; near: {', '.join(near)}" if near else f"; {these}: {', '.join(known[:12])}"
