"""What a run writes about itself: one JSON line a step, and TensorBoard's files where that is installed.

A run that goes on after a stop drops the lines of steps that it will do again, so the file has every step once, in
order, whatever happened.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any

from penstock.checkpoint.disk.plain_files import create, read_plain
from penstock.errors import UsageError


class Metrics:
    """The file of one run, open for the steps after `start`."""

    def __init__(self, path: Path, start: int, tensorboard: str = "off") -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(path) if line["step"] <= start] if start else []
        partial = path.with_name(f"{path.name}.partial")
        self._board = _board(tensorboard, path.parent / "tensorboard", start)
        self._file = create(partial)
        self._file.write("".join(json.dumps(line) + "\n" for line in kept))
        self._file.flush()
        os.replace(partial, path)

    def write(self, step: int, **values: Any) -> None:
        """One line; it is in the file when this returns, if not yet on the disk."""
        line = {"step": step, **{name: _plain(value) for name, value in values.items() if value is not None}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)) and math.isfinite(value):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a file; a last one that a kill cut short is left out."""
    found: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError):
        for text in read_plain(Path(path), None).splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                found.append(line)
    return found


def _board(wanted: str, folder: Path, start: int) -> Any:
    if wanted == "off":
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter  # optional
    except ImportError:
        if wanted == "on":
            raise UsageError(
                'logging.tensorboard is "on", but TensorBoard is not installed: pip install tensorboard'
            ) from None
        return None
    return SummaryWriter(str(folder), purge_step=start + 1)
