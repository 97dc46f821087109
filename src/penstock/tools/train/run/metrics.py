"""What a run writes about itself: one JSON line per step, passed on to whatever else wants the figures.

A run that goes on after a stop drops the lines of steps that it will do again, so the file has every step once, in
order, whatever happened.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from itertools import starmap
from math import isfinite
from pathlib import Path
from typing import Any

from penstock.errors import FileError, UsageError
from penstock.reading import parse_json, read_text
from penstock.rules import is_count, is_float
from penstock.tools.train.run.outlets import Outlet
from penstock.writing import create

MOST_METRICS = 2**30  # bytes, for some millions of steps
log = logging.getLogger("penstock.train")


class Metrics:
    """The file of one run, open for the steps after `start`, and the outlets that get the same figures."""

    def __init__(self, path: Path, start: int, outlets: Sequence[Outlet] = ()) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(path) if line["step"] <= start] if start else []
        partial = path.with_name(f"{path.name}.partial")
        self._outlets = outlets
        self._file = create(partial)
        self._file.write("".join(json.dumps(line) + "\n" for line in kept))
        self._file.flush()
        os.replace(partial, path)

    def write(self, step: int, **values: Any) -> None:
        """Write one line; it is in the file when this returns, if not yet on the disk."""
        figures = {name: value for name, value in values.items() if value is not None}
        # NaN and infinity, which JSON does not have, are written as text.
        plain = {
            name: str(each) if isinstance(each, float) and not isfinite(each) else each
            for name, each in figures.items()
        }
        line = {"step": step, **plain}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        self.check()
        for outlet in self._outlets:
            outlet.write(step, figures)

    def check(self) -> None:
        """Raise UsageError where the file is not at its place any more: what is written goes nowhere."""
        try:
            is_there = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise UsageError(
                f"{self.path} was removed, moved or replaced while the run wrote to it, perhaps with the run's folder; "
                f"put it back and add --resume, or start over"
            )

    def close(self) -> None:
        self._file.close()
        for outlet in self._outlets:
            outlet.close()


def _is_figure(name: str, value: Any) -> bool:
    """Return whether a line may have this value: a number, one for each process, or the text of NaN or infinity."""
    if name == "skipped":
        return value is True
    return is_float(value) or isinstance(value, str) or (isinstance(value, list) and all(map(is_float, value)))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a file; a last one that a kill cut short is left out, others with a warning."""
    try:
        text = read_text(path, MOST_METRICS, errors="replace")
    except FileNotFoundError:
        return []
    found: list[dict[str, Any]] = []
    lines = text.split("\n")
    for line in lines[:-1]:
        with contextlib.suppress(FileError):
            values = parse_json(line, path, dict)
            if is_count(values.get("step")) and all(starmap(_is_figure, values.items())):
                found.append(values)
    if lost := len(lines) - 1 - len(found):
        log.warning("%s: %d of %d lines are damaged, and left out", path, lost, len(lines) - 1)
    return found
