"""What runs of tiny_runs.py train on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tiny_runs


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 200)
    return path


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings of a run whose model and data are those of tiny_runs.py."""
    monkeypatch.setitem(sys.modules, "my_run", tiny_runs)
    return ["model.source=my_run:poisoned", "data.source=my_run:Numbers", "model.options={}"]
