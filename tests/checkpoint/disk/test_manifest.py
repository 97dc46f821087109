"""What a checkpoint is on disk: whole or not at all, refused when damaged, and never a way to run code."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from train_runs import Run

import penstock
from penstock.checkpoint.disk.manifest import MANIFEST, read_manifest, seal
from penstock.errors import CheckpointError


def test_every_flipped_bit_in_every_file_is_found_and_the_file_named(run: Run, saved: Path) -> None:
    for file in sorted(saved.iterdir()):
        content = file.read_bytes()
        for place in {0, 9, len(content) // 3, len(content) // 2, len(content) - 2}:
            flipped = bytearray(content)
            flipped[place] ^= 1 << (place % 7)
            file.write_bytes(flipped)
            with pytest.raises(CheckpointError, match=file.name):
                penstock.load(saved, run.pipe)
        file.write_bytes(content)
    penstock.load(saved, run.pipe)


@pytest.mark.parametrize("cut", [0, 1, 100, -2])
def test_a_truncated_file_is_refused_by_name(run: Run, saved: Path, cut: int) -> None:
    for file in sorted(saved.iterdir()):
        content = file.read_bytes()
        file.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=file.name):
            penstock.load(saved, run.pipe)
        file.write_bytes(content)


def test_a_missing_file_a_link_and_a_directory_in_its_place_are_refused(run: Run, saved: Path, tmp_path: Path) -> None:
    file = saved / "process-00000.safetensors"
    file.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"process-00000.safetensors is missing"):
        penstock.load(saved, run.pipe)
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="not a plain file"):
        penstock.load(saved, run.pipe)
    file.unlink()
    file.mkdir()
    with pytest.raises(CheckpointError, match="not a plain file"):
        penstock.load(saved, run.pipe)


@pytest.mark.parametrize(
    "forged",
    [
        {"origin": "x"},
        {"origin": {"folder": 3}},
        {"origin": {"config": []}},
        {"origin": {"adapter": {"lora_alpha": "x"}}},
        {"score": 10**400},
        {"score": "x"},
    ],
)
def test_a_manifest_with_values_of_another_kind_is_refused(saved: Path, forged: dict[str, object]) -> None:
    document = json.loads((saved / MANIFEST).read_text())
    kept = {name: value for name, value in document.items() if name not in ("format", "version", "checksum")}
    (saved / MANIFEST).write_bytes(seal({**kept, **forged}))
    with pytest.raises(CheckpointError, match=r"manifest\.json is not a complete manifest"):
        read_manifest(saved)


def test_what_is_no_checkpoint_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        penstock.load(tmp_path / "nowhere", run.pipe)
    torch.save(run.pipe.state_dict(), tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a directory"):
        penstock.load(tmp_path / "file.pt", run.pipe)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match="not a checkpoint of Penstock"):
        penstock.load(tmp_path / "dcp", run.pipe)


def test_no_file_of_a_checkpoint_is_a_pickle(saved: Path) -> None:
    for file in saved.iterdir():
        assert file.suffix in (".json", ".safetensors")
        with pytest.raises(pickle.UnpicklingError):
            pickle.loads(file.read_bytes())


def test_a_file_name_with_a_path_in_the_manifest_is_refused(run: Run, saved: Path) -> None:
    manifest = json.loads((saved / MANIFEST).read_bytes())
    manifest["files"]["../outside"] = [0, "00000000"]
    body = {key: value for key, value in manifest.items() if key not in ("format", "version", "checksum")}
    (saved / MANIFEST).write_bytes(seal(body))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        penstock.load(saved, run.pipe)
