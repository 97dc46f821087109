"""A directory of checkpoints: which are kept, passed over, replaced and cleared away."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from checkpoint.saved_files import names
from train_runs import Run
from typer.testing import CliRunner

import penstock
from penstock.checkpoint.checkpointer import Checkpointer
from penstock.checkpoint.disk.manifest import checkpoints_in, find_checkpoint
from penstock.cli import app
from penstock.errors import CheckpointError, UsageError


def test_keep_last_and_keep_every(run: Run, tmp_path: Path) -> None:
    with penstock.Checkpointer(tmp_path, keep_last=2, keep_every=4) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, run.pipe)
        checkpointer.wait()
        assert names(tmp_path) == [f"step-{step:08d}" for step in (4, 6, 7)]
        assert checkpointer.latest() == tmp_path / "step-00000007"


def test_a_step_that_is_saved_again_replaces_the_first_only_when_it_is_whole(run: Run, tmp_path: Path) -> None:
    with penstock.Checkpointer(tmp_path) as checkpointer:
        for number in range(3):
            checkpointer.save(5, run.pipe, extra=number)
        checkpointer.wait()
        assert len(checkpoints_in(tmp_path)) == 1
        assert checkpointer.load(run.pipe).extra == 2


def test_who_goes_back_and_trains_on_resumes_from_there(run: Run, tmp_path: Path) -> None:
    """The newest is the one that was saved last, not the one with the highest step; and it is not deleted at once."""
    with penstock.Checkpointer(tmp_path, keep_last=2) as checkpointer:
        for step in (100, 200, 300):
            checkpointer.save(step, run.pipe)
        checkpointer.save(150, run.pipe)
    with penstock.Checkpointer(tmp_path, keep_last=2) as checkpointer:
        assert checkpointer.load(run.pipe).step == 150
        checkpointer.save(160, run.pipe)
        checkpointer.wait()
        assert names(tmp_path) == ["step-00000150", "step-00000160"]


def test_a_torn_one_is_passed_over_and_said(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with penstock.Checkpointer(tmp_path, async_save=False) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, run.pipe, extra=step)
        (tmp_path / "step-00000004" / "index.json").unlink()
        assert checkpointer.latest() == tmp_path / "step-00000003"
        assert "step-00000004/index.json is missing" in caplog.text
        file = tmp_path / "step-00000003" / "process-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1  # only the checksum can tell
        file.write_bytes(content)
        caplog.clear()
        assert checkpointer.load(run.pipe).step == 2
        assert f"{file} is damaged" in caplog.text
        with pytest.raises(CheckpointError, match="step-00000003 is not complete"):
            checkpointer.load(run.pipe, path=tmp_path / "step-00000003")
        shutil.rmtree(tmp_path / "step-00000002")
        with pytest.raises(CheckpointError, match="not complete"):
            checkpointer.load(run.pipe)
        shutil.rmtree(tmp_path / "step-00000003")
        with pytest.raises(CheckpointError, match="no complete checkpoint; 1 are damaged"):
            checkpointer.load(run.pipe)


def test_what_a_killed_run_left_is_cleared_away(run: Run, tmp_path: Path) -> None:
    (tmp_path / ".step-00000009.0badcafe").mkdir()
    (tmp_path / ".step-00000009.0badcafe" / "process-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".trash-step-00000001").mkdir()
    (tmp_path / "notes").mkdir()
    with penstock.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, run.pipe)
    assert names(tmp_path) == ["notes", "step-00000001"]


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
