"""What cannot be saved is refused with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.saved_files import Evil, names
from train_runs import Run

import penstock
from penstock.errors import UsageError


def test_objects_are_refused_when_they_are_saved_with_their_place(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"extra\['a'\]\[1\] is a .*Evil"):
        penstock.save(tmp_path / "x", run.pipe, extra={"a": [1, Evil(tmp_path)]})
    with pytest.raises(UsageError, match="data=object"):
        penstock.save(tmp_path / "x", run.pipe, data=object())
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UsageError, match="holds itself"):
        penstock.save(tmp_path / "x", run.pipe, extra=endless)
    assert names(tmp_path) == []


def test_a_config_that_cannot_be_saved_leaves_nothing(run: Run, tmp_path: Path) -> None:
    with penstock.Checkpointer(tmp_path) as checkpointer:
        for config in ({"a": torch.zeros(2)}, {"b": object()}):
            with pytest.raises(UsageError, match="config"):
                checkpointer.save(1, run.pipe, config=config)
    assert names(tmp_path) == []
