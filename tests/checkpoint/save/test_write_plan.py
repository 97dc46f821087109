"""The files of a checkpoint, for other programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_runs import Run

from penstock.checkpoint.disk.manifest import read_manifest


def test_the_files_are_plain_safetensors_under_the_models_own_names(run: Run, saved: Path) -> None:
    tensors = load_file(saved / "process-00000.safetensors")
    assert torch.equal(tensors["model.embed.weight"], dict(run.pipe.named_parameters())["embed.weight"])
    assert "model.head.weight" not in tensors  # tied: once
    assert torch.equal(
        tensors["optimizer.embed.weight.exp_avg"],
        run.optimizer.state[dict(run.pipe.named_parameters())["embed.weight"]]["exp_avg"],
    )
    assert read_manifest(saved).step == 1


def test_torchs_own_reader_loads_them(run: Run, saved: Path) -> None:
    import torch.distributed.checkpoint as dcp

    name = "model.blocks.0.0.weight"
    state = {name: torch.zeros(8, 8)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(saved)))
    assert torch.equal(state[name], dict(run.pipe.named_parameters())[name.removeprefix("model.")])
