"""`save` and `load`: one checkpoint, at exactly the path that is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint.saved_files import names
from train_runs import Run

import penstock
from penstock.errors import CheckpointError


def test_a_path_is_written_once_and_a_directory_means_its_newest(run: Run, tmp_path: Path) -> None:
    penstock.save(tmp_path / "runs" / "step-00000007", run.pipe, step=7)
    with pytest.raises(CheckpointError, match="step-00000007 already exists; choose another path"):
        penstock.save(tmp_path / "runs" / "step-00000007", run.pipe, step=8)
    assert names(tmp_path / "runs") == ["step-00000007"]
    assert penstock.load(tmp_path / "runs", run.pipe).step == 7
    assert penstock.load(tmp_path / "runs" / "step-00000007", run.pipe).step == 7
    with pytest.raises(CheckpointError, match="not a checkpoint of Penstock"):
        penstock.load(tmp_path, run.pipe)
