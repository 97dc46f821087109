"""A run of one step, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.saved_files import ONE, PRECIOUS
from checkpoint.short_run import saved_run
from train_runs import Run

import penstock


@pytest.fixture(scope="module")
def run() -> Any:
    run = Run(**ONE)
    run.step()
    yield run
    run.close()


@pytest.fixture
def saved(run: Run, tmp_path: Path) -> Path:
    penstock.save(tmp_path / "it", run.pipe, run.optimizer, step=1, extra={"a": torch.arange(3)})
    return tmp_path / "it"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    file = tmp_path / "elsewhere"
    file.write_text(PRECIOUS)
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with checkpoints of a run, and the weights that the last of them has."""
    folder = tmp_path_factory.mktemp("run")
    return folder, saved_run(folder)
