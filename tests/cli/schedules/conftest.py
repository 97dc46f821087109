"""Files that several of these tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.schedule import build, insert_reductions, insert_shards


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Sharding and reductions, but no transfers."""
    insert_shards(insert_reductions(build("1f1b", 2, 2)), 1).save(tmp_path / "sharded.json")
    return tmp_path / "sharded.json"
