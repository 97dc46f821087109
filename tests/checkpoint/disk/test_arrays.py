"""The tensors of a checkpoint as numpy arrays, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoint.saved_files import forge
from train_runs import Run

import penstock
from penstock.checkpoint.disk.arrays import read_arrays
from penstock.errors import CheckpointError


def test_arrays_are_the_models_tensors_and_averages_where_there_are_some(run: Run, tmp_path: Path) -> None:
    state = run.pipe.state_dict()
    name, value = next((name, value) for name, value in run.pipe.named_parameters())
    with penstock.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, run.pipe, averages={name: value.detach() + 1})
    found = read_arrays(tmp_path / "step-00000001")
    for key, array in found.items():
        np.testing.assert_array_equal(array, state[key].numpy() + (key == name))
    assert name in found


def test_what_is_not_as_the_index_says_is_refused(saved: Path) -> None:
    index = json.loads((saved / "index.json").read_bytes())
    index["tensors"]["model.embed.weight"]["shape"][0] += 1
    forge(saved, index_json=json.dumps(index).encode())
    with pytest.raises(CheckpointError, match=r"not as the index says.*do not cover it"):
        read_arrays(saved)
    (saved / "index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is not complete:\n.*index\.json has 2 bytes"):
        read_arrays(saved)
