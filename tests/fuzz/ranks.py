"""What a process of the fuzz runs. In a file of its own: a process loads it by its path, under another name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fuzz.case import Case
from fuzz.run import Outcome, defined, piped, quiet

__all__ = ["run_on_rank"]


def run_on_rank(cases: Sequence[Case]) -> list[dict[str, Any] | Outcome]:
    """The cases in turn, and what this rank has of each."""
    found = []
    for case in cases:
        with quiet(case):
            found.append(piped(case, defined(case)))
    return found
