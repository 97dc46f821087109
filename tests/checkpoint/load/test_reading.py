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
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import tiers
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.checkpoint.disk.manifest import INDEX, MANIFEST, checksum_of, seal
from penstock.checkpoint.export import export
from penstock.errors import CheckpointError

NUMBERS = "process-00000.safetensors"
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**62, 2**80, 1e308, float("inf"), "", "x", "../../etc/passwd", "float32", "qint8", "load",
    [], [-1], [2**40, 2**40], {}, {"$tensor": "no such"}, {"$tuple": 3}, {"$dtype": "load"}, {"$nothing": 1},
    {"$array": "no such"}, {"$bytes": "?"}, {"$float": "x"}, {"$dict": [1]}, {"$complex": [1]}, {"$device": "x"},
]  # fmt: skip


class Data:
    """Refuses, as data sets of users do, a state that it cannot read."""

    def __init__(self) -> None:
        self.order = [2, 0, 1]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = [int(number) for number in state["order"]]


def pipeline() -> tuple[penstock.Pipeline, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(0)
    pipe = penstock.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], microbatches=2, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(pipe.parameters())
    return pipe, optimizer, {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10), "data": Data()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forged") / "whole"
    pipe, optimizer, parts = pipeline()
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
    optimizer.step()
    penstock.save(path, pipe, optimizer, step=3, extra={"note": (1, 2.5)}, **parts)
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
    listed = manifest.get("files")
    for name in {INDEX, NUMBERS} & listed.keys() if isinstance(listed, dict) else ():
        listed[name] = [(path / name).stat().st_size, checksum_of(path / name)]
    body = {name: value for name, value in manifest.items() if name not in ("checksum", "format", "version")}
    (path / MANIFEST).write_bytes(seal(body))


def load(path: Path) -> CheckpointError | None:
    """The error, with the proof that nothing was loaded; None where it is a checkpoint like any other."""
    pipe, optimizer, parts = pipeline()
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    states = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    drawn = torch.get_rng_state()
    found = None
    try:
        penstock.load(path, pipe, optimizer, **parts)
    except CheckpointError as error:
        found = error
    pipe.close()
    if found is not None:
        assert all(torch.equal(before[name], value) for name, value in pipe.state_dict().items())
        assert not optimizer.state
        assert states == {name: part.state_dict() for name, part in parts.items()}
        assert torch.equal(drawn, torch.get_rng_state())
        assert str(path) in str(found)
    return found


@pytest.mark.parametrize("count", tiers(60, 2000))
def test_any_value_in_any_place(count: int, saved: Path, tmp_path: Path) -> None:
    chance = random.Random(5)
    content = (saved / NUMBERS).read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    head = json.loads(content[8:length])
    manifest, index = (json.loads((saved / name).read_bytes()) for name in (MANIFEST, INDEX))
    refused = 0
    for number in range(count):
        path = tmp_path / str(number)
        shutil.copytree(saved, path)
        forged, document = copy.deepcopy(manifest), index
        for _ in range(chance.choice((1, 1, 2))):
            which = chance.random()
            if which < 0.25:
                forged = changed(forged, chance.choice(places(forged)[1:]), chance.choice(ODD))
            elif which < 0.75:
                document = changed(document, chance.choice(places(document)), chance.choice(ODD))
            elif which < 0.9:
                written = json.dumps(changed(head, chance.choice(places(head)), chance.choice(ODD))).encode()
                (path / NUMBERS).write_bytes(len(written).to_bytes(8, "little") + written + content[length:])
            else:
                odd = bytearray(content[: chance.randrange(1, 2 * len(content))])
                odd[chance.randrange(min(len(odd), length))] = chance.randrange(256)
                (path / NUMBERS).write_bytes(odd)
        (path / INDEX).write_text(json.dumps(document))
        reseal(path, forged)
        refused += load(path) is not None
        shutil.rmtree(path)
    assert refused > count // 3


def test_what_a_user_s_own_part_refuses_loads_nothing(saved: Path, tmp_path: Path) -> None:
    """Weights, optimizer and random numbers were already those of the checkpoint when the data refused its state."""
    path = tmp_path / "refused"
    shutil.copytree(saved, path)
    index = json.loads((path / INDEX).read_bytes())
    index["processes"][0]["data"]["order"] = ["first"]
    (path / INDEX).write_text(json.dumps(index))
    reseal(path, json.loads((path / MANIFEST).read_bytes()))
    assert "data= does not accept the state" in str(load(path))


def test_one_tensor_named_many_times_is_not_read_many_times(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "repeated"
    shutil.copytree(saved, path)
    index = json.loads((path / INDEX).read_bytes())
    index["processes"][0]["extra"] = [index["processes"][0]["generators"]["torch"]] * 100_000
    (path / INDEX).write_text(json.dumps(index))
    reseal(path, json.loads((path / MANIFEST).read_bytes()))
    assert "the values of one process name tensors of" in str(load(path))


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


def test_a_file_is_not_read_again_for_each_piece_of_a_tensor(saved: Path, tmp_path: Path) -> None:
    """An export of a checkpoint of megabytes filled the memory: one tensor of the file was a thousand pieces."""
    path = tmp_path / "pieces"
    shutil.copytree(saved, path)
    index = json.loads((path / INDEX).read_bytes())
    key = next(key for key, value in index["tensors"].items() if value["shape"] == [4, 4])
    (chunk,) = index["tensors"][key]["chunks"]
    rows = [{**chunk, "offsets": [4 * number, 0]} for number in range(1000)]
    index["tensors"][key] |= {"shape": [4000, 4], "chunks": rows}
    (path / INDEX).write_text(json.dumps(index))
    reseal(path, json.loads((path / MANIFEST).read_bytes()))
    with pytest.raises(CheckpointError, match=f"{NUMBERS} is to have several pieces of {key}"):
        export(path, tmp_path / "out")


def test_a_tensor_in_thousands_of_columns_is_refused_at_once(saved: Path, tmp_path: Path) -> None:
    """Each piece was compared with each: an index of three megabytes took minutes, and one of a hundred, days."""
    path = tmp_path / "columns"
    shutil.copytree(saved, path)
    index = json.loads((path / INDEX).read_bytes())
    columns = [{"offsets": [0, number], "sizes": [1, 1], "file": NUMBERS} for number in range(20_000)]
    index["tensors"]["planted"] = {"dtype": "float32", "shape": [1, 20_000], "chunks": columns}
    (path / INDEX).write_text(json.dumps(index))
    reseal(path, json.loads((path / MANIFEST).read_bytes()))
    assert "20,000 pieces of a tensor are too many side by side" in str(load(path))


@pytest.mark.parametrize("name", [MANIFEST, INDEX, NUMBERS])
@pytest.mark.parametrize("kind", ["fifo", "folder", "deep", "link", "loop"])
def test_what_is_no_file_of_a_checkpoint(kind: str, name: str, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd"
    shutil.copytree(saved, path)
    manifest = json.loads((path / MANIFEST).read_bytes())
    (path / name).unlink()
    if kind == "fifo":
        os.mkfifo(path / name)
    elif kind == "folder":
        (path / name).mkdir()
    elif kind == "loop":
        (path / name).symlink_to(path / name)
    elif kind == "link":
        (path / name).symlink_to("/dev/zero")
    else:
        (path / name).write_bytes(b"[" * 200_000)
        if name != MANIFEST:
            reseal(path, manifest)
    assert load(path) is not None
