"""The checkpoint with the lowest score: it stays, and it can be named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from train_runs import Run
from typer.testing import CliRunner

from penstock.checkpoint.checkpointer import Checkpointer
from penstock.checkpoint.disk.manifest import find_checkpoint
from penstock.cli import app
from penstock.errors import UsageError


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path) -> None:
    run = Run(stages=1)
    with Checkpointer(tmp_path / "run", keep_last=1, keep_best=True, async_save=False) as checkpointer:
        for step, score in {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 1.0}.items():
            checkpointer.save(step, run.pipe, score=score)
        with pytest.raises(UsageError, match="score=nan: pass a finite number"):
            checkpointer.save(6, run.pipe, score=math.nan)
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-00000002", "step-00000005"]
    assert find_checkpoint(tmp_path / "run").name == "step-00000005"
    assert find_checkpoint(tmp_path / "run" / "best").name == "step-00000002"
    listed = CliRunner().invoke(app, ["checkpoint", "list", str(tmp_path / "run")]).stdout.splitlines()
    assert [line.partition("complete")[2] for line in listed[1:]] == [", score 1.0000, the best", ", score 1.0000"]
    with Checkpointer(tmp_path / "none", async_save=False) as checkpointer:
        checkpointer.save(1, run.pipe)
    with Checkpointer(tmp_path / "beside", keep_last=2, keep_best=True, async_save=False) as checkpointer:
        for step, score in {1: 9.0, 2: 4.0, 3: 3.0, 4: None, 5: 5.0}.items():
            checkpointer.save(step, run.pipe, score=score, while_best=step in (2, 3, 5))
    left = sorted(path.name[-1] for path in (tmp_path / "beside").glob("step-*"))
    assert left == ["1", "3", "4", "5"]  # the two due ones, the best, and the newest, which is not the best
    with pytest.raises(UsageError, match="none of the 1 checkpoints there has a score"):
        find_checkpoint(tmp_path / "none" / "best")
    run.close()
