"""One run at a time writes to a directory of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint.saved_files import PRECIOUS, fifo, link, names
from train_runs import Run

import penstock
from penstock.checkpoint.disk.lock import Lock
from penstock.errors import CheckpointError, UsageError


def test_two_runs_cannot_write_to_one_directory(run: Run, tmp_path: Path) -> None:
    one, two = penstock.Checkpointer(tmp_path), penstock.Checkpointer(tmp_path)
    one.save(1, run.pipe)
    with pytest.raises(CheckpointError, match="another Checkpointer of this process"):
        two.save(1, run.pipe)
    one.close()
    two.save(2, run.pipe)
    two.close()
    with pytest.raises(UsageError, match="is closed"):
        one.save(3, run.pipe)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("prepare", [link, fifo])
def test_a_lock_writes_into_no_file_that_was_prepared(
    prepare: Callable[[Path, Path], None], elsewhere: Path, tmp_path: Path
) -> None:
    """The lock of a run was opened through a symlink, and emptied the file that it led to."""
    prepare(tmp_path / ".lock", elsewhere)
    with pytest.raises(OSError, match=r"it is (a symlink|not a plain file).*remove it.*\.lock"):
        Lock(tmp_path).take()
    assert elsewhere.read_text() == PRECIOUS
    (tmp_path / ".lock").unlink()
    lock = Lock(tmp_path)
    assert lock.take()
    lock.free()
