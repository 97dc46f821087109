"""The folder of a run: what is protected, and what is not a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import config_of, trained

from penstock.errors import CheckpointError, UsageError
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.run.run_folder import RunFolder


def begin(root: Path, *, resume: bool = False) -> RunFolder:
    folder = RunFolder(root)
    folder.prepare(TrainConfig(output=str(root)), resume=resume, fresh=False).free()
    return folder


def test_a_run_that_failed_before_its_first_step_is_replaced(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run")
    folder.keep_cut(2, [1, 3])
    folder.incidents.write_text("{}\n")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert begin(tmp_path / "run").cut() is None  # a cut of the failed start does not hold for this one
    assert not folder.incidents.exists()
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_results_are_protected(tmp_path: Path) -> None:
    begin(tmp_path / "figures").metrics.write_text('{"step": 1}\n')
    (begin(tmp_path / "saved").checkpoints / "step-00000001").mkdir()
    for name in ("figures", "saved"):
        with pytest.raises(UsageError, match="has a run already; add --resume"):
            begin(tmp_path / name)
        begin(tmp_path / name, resume=True)


def test_a_folder_of_something_else_is_protected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UsageError, match="has a run already"):
        begin(tmp_path)
    assert "llama" in (tmp_path / "config.json").read_text()


def test_another_run_is_not_written_over(tmp_path: Path, text: Path) -> None:
    config = config_of(tmp_path, text, "training.steps=1")
    folder = RunFolder(Path(config.output))
    with pytest.raises(UsageError, match="has no run to go on from"):
        folder.prepare(config, resume=True, fresh=False)
    assert trained(config) == 0
    note = folder.root / "my notes.txt"
    note.write_text("mine")
    with pytest.raises(UsageError, match="has a run already; add --resume"):
        folder.prepare(config, resume=False, fresh=False)
    lock = folder.prepare(config, resume=False, fresh=True)
    with pytest.raises(CheckpointError, match="is being written to by"):  # the run that holds it is not cleared away
        folder.prepare(config, resume=False, fresh=True)
    lock.free()
    assert note.exists()
    assert not folder.metrics.exists()
    assert not list(folder.checkpoints.iterdir())
    with pytest.raises(UsageError, match="which is a file"):
        RunFolder(note).prepare(config, resume=False, fresh=False)
