"""Whether a folder has weights, and what to do where it has none."""

from __future__ import annotations

from pathlib import Path

from penstock.checkpoint.files.weights import has_weights, no_weights


def test_a_folder_has_weights_under_the_names_of_transformers(tmp_path: Path) -> None:
    assert not has_weights(tmp_path)
    assert "neither model.safetensors nor model.safetensors.index.json" in no_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert not has_weights(tmp_path)
    assert "has its weights in pytorch_model.bin, and only safetensors are read" in no_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").touch()
    assert has_weights(tmp_path)
