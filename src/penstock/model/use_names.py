"""How `split_at` names a place: a module or parameter, or `name#2` for the second time that it is used."""

from __future__ import annotations

__all__ = ["name_and_use"]


def name_and_use(place: str) -> tuple[str, int]:
    """The name, and which of its uses; the first where none is said."""
    name, mark, use = place.rpartition("#")
    return (name, int(use)) if mark and use.isdecimal() and int(use) > 0 else (place, 1)
