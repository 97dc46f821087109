"""Checkpoints that somebody has written on purpose: checksums are right, and what they say is not.

Each is a `CheckpointError` that names where it is, with nothing loaded, or a checkpoint with other numbers in it; never
another error, a wait, or memory without bound.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import tiers
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.checkpoint.disk.manifest import INDEX, MANIFEST, checksum_of, seal
from penstock.errors import CheckpointError

ODD: list[Any] = [
    None, True, -1, 0, 1, 2**62, 2**80, 1e308, float("inf"), "", "x", "../../etc/passwd", "float32", "qint8", "load",
    [], [-1], [2**40, 2**40], {}, {"$tensor": "no such"}, {"$tuple": 3}, {"$dtype": "load"}, {"$nothing": 1},
    {"$array": "no such"}, {"$bytes": "?"}, {"$float": "x"}, {"$dict": [1]}, {"$complex": [1]}, {"$device": "x"},
]  # fmt: skip


def pipeline() -> tuple[penstock.Pipeline, torch.optim.Optimizer]:
    torch.manual_seed(0)
    pipe = penstock.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], microbatches=2, loss_fn=F.mse_loss)
    return pipe, torch.optim.AdamW(pipe.parameters())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forged") / "whole"
    pipe, optimizer = pipeline()
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
    optimizer.step()
    penstock.save(path, pipe, optimizer, step=3, extra={"note": (1, 2.5)})
    pipe.close()
    return path


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON document."""
    inside = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [path, *(place for key, value in inside for place in places(value, (*path, key)))]


def changed(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    made = copy.deepcopy(document)
    here = made
    for key in place[:-1]:
        here = here[key]
    here[place[-1]] = value
    return made


def reseal(path: Path, manifest: dict[str, Any]) -> None:
    """Right checksums for whatever is there."""
    if isinstance(manifest.get("files"), dict) and INDEX in manifest["files"]:
        index = path / INDEX
        manifest["files"][INDEX] = [index.stat().st_size, checksum_of(index)]
    body = {name: value for name, value in manifest.items() if name not in ("checksum", "format", "version")}
    (path / MANIFEST).write_bytes(seal(body))


def load(path: Path) -> CheckpointError | None:
    """The error, with the proof that nothing was loaded; None where it is a checkpoint like any other."""
    pipe, optimizer = pipeline()
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    found = None
    try:
        penstock.load(path, pipe, optimizer)
    except CheckpointError as error:
        found = error
    pipe.close()
    if found is not None:
        assert all(torch.equal(before[name], value) for name, value in pipe.state_dict().items())
        assert not optimizer.state
        assert str(path.parent) in str(found)
    return found


@pytest.mark.parametrize("count", tiers(60, 2000))
def test_any_value_in_any_place(count: int, saved: Path, tmp_path: Path) -> None:
    chance = random.Random(5)
    manifest, index = (json.loads((saved / name).read_bytes()) for name in (MANIFEST, INDEX))
    refused = 0
    for number in range(count):
        path = tmp_path / str(number)
        shutil.copytree(saved, path)
        forged, document = copy.deepcopy(manifest), index
        for _ in range(chance.choice((1, 1, 2))):
            if chance.random() < 0.3:
                forged = changed(forged, chance.choice(places(forged)[1:]), chance.choice(ODD))
            else:
                document = changed(document, chance.choice(places(document)), chance.choice(ODD))
        (path / INDEX).write_text(json.dumps(document))
        reseal(path, forged)
        refused += load(path) is not None
        shutil.rmtree(path)
    assert refused > count // 3


def test_pieces_that_overlap(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "overlap"
    shutil.copytree(saved, path)
    index = json.loads((path / INDEX).read_bytes())
    key = next(key for key, value in index["tensors"].items() if value["shape"] == [4, 4])
    (chunk,) = index["tensors"][key]["chunks"]
    half = {**chunk, "sizes": [2, 4]}
    index["tensors"][key]["chunks"] = [{**half, "offsets": [0, 0]}, {**half, "offsets": [1, 0]}]
    (path / INDEX).write_text(json.dumps(index))
    reseal(path, json.loads((path / MANIFEST).read_bytes()))
    assert "overlap" in str(load(path))


@pytest.mark.parametrize("name", [MANIFEST, INDEX])
@pytest.mark.parametrize("kind", ["fifo", "folder", "deep", "link"])
def test_what_is_no_file_of_a_checkpoint(kind: str, name: str, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd"
    shutil.copytree(saved, path)
    manifest = json.loads((path / MANIFEST).read_bytes())
    (path / name).unlink()
    if kind == "fifo":
        os.mkfifo(path / name)
    elif kind == "folder":
        (path / name).mkdir()
    elif kind == "link":
        (path / name).symlink_to("/dev/zero")
    else:
        (path / name).write_bytes(b"[" * 200_000)
        if name == INDEX:
            content = (path / name).read_bytes()
            manifest["files"][INDEX] = [len(content), f"{zlib.crc32(content):08x}"]
            (path / MANIFEST).write_bytes(
                seal({k: v for k, v in manifest.items() if k not in ("checksum", "format", "version")})
            )
    assert load(path) is not None
