"""A save whose disk is full or whose folder cannot be written: an error, and nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoint.saved_files import fill_the_disk, names
from train_runs import Run

import penstock
from penstock.errors import CheckpointError


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_full_disk_is_an_error_at_the_next_call_and_leaves_nothing_behind(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    with penstock.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, run.pipe, run.optimizer)
        checkpointer.wait()
        size = sum(file.stat().st_size for file in (tmp_path / "step-00000001").iterdir())
        fill_the_disk(monkeypatch, int(share * size))
        checkpointer.save(2, run.pipe, run.optimizer)
        with pytest.raises(CheckpointError, match=r"step 2 could not be saved .*No space left.*earlier checkpoints"):
            checkpointer.wait()
        checkpointer.wait()  # said once
        assert names(tmp_path) == ["step-00000001"]
        checkpointer.save(3, run.pipe)
        checkpointer._under_way[0][1].exception()
        with pytest.raises(CheckpointError, match="step 3 could not be saved"):
            checkpointer.save(4, run.pipe)
        monkeypatch.undo()
        checkpointer.save(5, run.pipe)
    assert names(tmp_path) == ["step-00000001", "step-00000005"]


def test_a_folder_that_became_read_only_is_an_error_that_says_what_was_not_saved(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "[Errno 30] Read-only file system" and no more."""
    with penstock.Checkpointer(tmp_path) as writer:
        writer.save(1, run.pipe, run.optimizer)
        writer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "mkdir", lambda *_, **__: os.mkdir("/proc/self/nowhere"))
            with pytest.raises(
                CheckpointError, match=r"step 2 could not be saved in .*; earlier checkpoints are unchanged"
            ):
                writer.save(2, run.pipe, run.optimizer)
    assert names(tmp_path) == ["step-00000001"]
