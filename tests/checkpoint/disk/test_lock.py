"""One run at a time writes to a directory of checkpoints."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoint.saved_files import PRECIOUS, fifo, link, names
from train_runs import Run

import penstock
from penstock.checkpoint.disk import lock as lock_module
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
    with pytest.raises(OSError, match=r"\.lock: it is (a symlink|not a plain file).*remove it"):
        Lock(tmp_path).take()
    assert elsewhere.read_text() == PRECIOUS
    (tmp_path / ".lock").unlink()
    lock = Lock(tmp_path)
    assert lock.take()
    lock.free()


def test_a_run_that_needs_longer_to_end_can_be_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is cut off keeps its lock until its own timeout; every attempt to go on without it was refused after
    five seconds and cost a restart."""
    monkeypatch.setattr(lock_module, "PATIENCE", 0.0)
    holder = "import sys; from pathlib import Path; from penstock.checkpoint.disk.lock import Lock\n"
    holder += "Lock(Path(sys.argv[1])).take(); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holder, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(CheckpointError, match=f"is being written to by process {process.pid}"):
            Lock(tmp_path).take()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(Lock(tmp_path).take, 60.0)
            process.stdin.close()
            assert waiting.result(60)
