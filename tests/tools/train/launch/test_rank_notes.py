"""Notes of ranks that failed: read as they were left, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PeerFailure, UsageError
from penstock.tools.train.launch.rank_notes import leave_note, read_note


@pytest.mark.parametrize(
    ("error", "culprit", "cause", "usage"),
    [
        (UsageError("no such key"), 1, "no such key", True),
        (PeerFailure(3, "gone", stage=2), 3, "gone", False),
        (KeyError("x"), 1, "KeyError: 'x'", False),
    ],
)
def test_a_note_is_read_as_it_was_left(error: Exception, culprit: int, cause: str, usage: bool, tmp_path: Path) -> None:
    leave_note(tmp_path / "logs" / "note.json", 1, error, final=usage)
    found = read_note(tmp_path / "logs" / "note.json")
    assert found is not None
    assert (found["rank"], found["culprit"], found["cause"], found["usage"]) == (1, culprit, cause, usage)


@pytest.mark.parametrize("change", [{"rank": "x"}, {"culprit": None}, {"cause": 3}, {"final": "no"}, {"usage": []}])
def test_a_note_of_somebody_else_is_none(change: dict[str, Any], tmp_path: Path) -> None:
    """The launcher, which was to name the rank that failed, failed itself."""
    path = tmp_path / "note.json"
    leave_note(path, 1, KeyError("x"), final=False)
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, **change}))
    assert read_note(path) is None
    path.write_text(json.dumps({name: value for name, value in found.items() if name not in change}))
    assert read_note(path) is None
    assert read_note(tmp_path / "none.json") is None
