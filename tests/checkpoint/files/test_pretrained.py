"""Weights from a folder that `save_pretrained` has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import penstock
from penstock.checkpoint.files import pretrained
from penstock.checkpoint.files.pretrained import PretrainedFolder
from penstock.errors import UsageError


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 4))
    made[3].weight = made[0].weight
    made[1].register_buffer("scale", torch.tensor([2.0, 3.0]))
    return made


def stored(folder: Path, *, files: int = 1, **changes: torch.Tensor | None) -> Path:
    state = {name: value for name, value in model().state_dict().items() if name != "3.weight"}
    state |= changes  # type: ignore[arg-type]
    state = {name: value for name, value in state.items() if value is not None}
    folder.mkdir()
    if files == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    places = {name: f"part-{number % files}.safetensors" for number, name in enumerate(state)}
    for file in set(places.values()):
        save_file({name: state[name] for name in state if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("files", [1, 3])
def test_a_lazy_model_is_filled_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    monkeypatch.setattr(pretrained, "PIECE", 40)  # two rows of some of them
    folder = PretrainedFolder(stored(tmp_path / "it", files=files))
    with penstock.lazy():
        lazy = model()
    lazy[1].scale.zero_()
    folder.fit(lazy)
    with penstock.Pipeline(lazy, stages=2, microbatches=1, init=folder) as pipe:
        found, wanted = pipe.full_state_dict(), model().state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert lazy[3].weight is lazy[0].weight


def test_values_take_the_type_of_the_model(tmp_path: Path) -> None:
    folder, half = PretrainedFolder(stored(tmp_path / "it")), torch.empty(4, 4, dtype=torch.bfloat16)
    folder("0.weight", half)
    assert torch.equal(half, model()[0].weight.to(torch.bfloat16))


def test_all_that_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = stored(tmp_path / "it", **{"1.bias": None, "more": torch.zeros(1), "2.weight": torch.zeros(5, 6)})
    with pytest.raises(UsageError) as raised:
        PretrainedFolder(folder).fit(model())
    for part in ("missing 1.bias;", "unknown more;", "of another shape 2.weight (5, 6), not (4, 6)"):
        assert part in str(raised.value)


def test_a_folder_without_weights_or_with_a_wrong_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"neither model\.safetensors nor"):
        PretrainedFolder(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../a.safetensors"}}')
    with pytest.raises(UsageError, match="not a file of the same folder"):
        PretrainedFolder(tmp_path)
    index.write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(UsageError, match=r"gone\.safetensors: there is no such file"):
        PretrainedFolder(tmp_path)
    (tmp_path / "gone.safetensors").write_bytes(b"\x40" + b"\0" * 7 + b'{"a"')
    with pytest.raises(UsageError, match=r"gone\.safetensors \(12 bytes\) cannot be read, .*; copy it again"):
        PretrainedFolder(tmp_path)


def test_a_type_that_is_not_read_here_is_named(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(UsageError, match=r"model\.safetensors: a is of type F8_E8M0, not read here"):
        PretrainedFolder(tmp_path)
