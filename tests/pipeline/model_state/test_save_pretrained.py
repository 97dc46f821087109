"""The whole model tensor by tensor (`full_tensors`), and as a folder that `from_pretrained` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_processes
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import CheckpointError, UsageError

W = 8


class Configuration:
    """Of a model that looks like one of transformers, which would take seconds to load in every process."""

    model_type = "layered"

    def to_json_string(self) -> str:
        return json.dumps({"model_type": self.model_type, "hidden_size": W})


class Layered(nn.Sequential):
    """Two of its layers have one weight."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__(*(nn.Sequential(nn.Linear(W, W), nn.Tanh()) for _ in range(4)))
        self[3][0].weight = self[0][0].weight
        self[2].register_buffer("count", torch.arange(3))
        self.config = Configuration()


def trained(model: nn.Module, step: Any, parameters: Any) -> None:
    x, y = torch.randn(2, 8, W, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(2):
        step(x, y)
        optimizer.step()
        optimizer.zero_grad()


def expected() -> dict[str, Tensor]:
    """The state after a plain loop."""
    model = Layered()

    def step(x: Tensor, y: Tensor) -> None:
        F.mse_loss(model(x), y).backward()

    trained(model, step, model.parameters())
    return model.state_dict()


def read(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def is_saved(found: dict[str, Tensor]) -> None:
    wanted = expected()
    del wanted["3.0.weight"]  # tied: stored once
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


def test_on_threads_the_folder_and_the_tensors_are_those_of_the_model(tmp_path: Path) -> None:
    model = Layered()
    with penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=F.mse_loss) as pipe:
        trained(model, lambda x, y: pipe.step(x, target=y), pipe.parameters())
        pairs = list(pipe.full_tensors())
        assert [name for name, _ in pairs] == [name for name in model.state_dict() if name != "3.0.weight"]
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in pairs)
        pairs[0][1].zero_()  # a copy
        pipe.save_pretrained(tmp_path / "one")
        pipe.save_pretrained(tmp_path / "several", max_shard_size=300)
        with pytest.raises(UsageError, match="is there already"):
            pipe.save_pretrained(tmp_path / "one")
        with pytest.raises(UsageError, match="no adapters"):
            pipe.save_pretrained(tmp_path / "two", merge_adapters=True)
        with pytest.raises(UsageError, match="none of the files of a tokenizer"):
            pipe.save_pretrained(tmp_path / "two", tokenizer=tmp_path)
    is_saved(read(tmp_path / "one"))
    is_saved(read(tmp_path / "several"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "several"]
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(read(tmp_path / "several"))
    assert json.loads((tmp_path / "one" / "config.json").read_text())["dtype"] == "float32"
    assert penstock.PretrainedFolder(tmp_path / "several").tensors.keys() == index["weight_map"].keys()


def test_a_tokenizer_goes_along(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer.json").write_text("{}")
    with penstock.Pipeline(Layered(), stages=2, microbatches=2) as pipe:
        pipe.save_pretrained(tmp_path / "out", tokenizer=tmp_path / "words")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_a_model_of_no_library_is_refused(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with (
        penstock.Pipeline(layers, stages=2, microbatches=1) as pipe,
        pytest.raises(UsageError, match="no model of transformers"),
    ):
        pipe.save_pretrained(tmp_path / "out")


# -- on processes

MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "plain": ({}, {}),
    "fsdp": ({"pp": 2, "dp": 2}, {"replicate": "fsdp"}),
    "tp": ({"pp": 2, "tp": 2}, {"tensor_plan": {"[12].0": "colwise-gathered"}}),
}


def saves(kind: str, folder: str) -> list[str]:
    axes, options = MESHES[kind]
    mesh = penstock.mesh(**axes) if axes else None
    pipe = penstock.Pipeline(
        Layered(),
        stages=2,
        microbatches=2,
        loss_fn=F.mse_loss,
        mesh=mesh,
        parallel_options=penstock.ParallelOptions(**options),
    )

    def step(x: Tensor, y: Tensor) -> None:
        share = slice(mesh.get_local_rank("dp"), None, 2) if kind == "fsdp" else slice(None)
        pipe.step(x[share], target=y[share])

    trained(pipe, step, pipe.parameters())
    pipe.save_pretrained(Path(folder, kind), max_shard_size=600)
    streamed = dict(pipe.full_tensors())
    is_saved(streamed)
    only = [name for name, _ in pipe.full_tensors(rank=1)]
    walked = []
    for name, _ in pipe.full_tensors():  # rank 0 walks all of it; the others leave after the first
        walked.append(name)
        if dist.get_rank():
            break
    assert walked == (list(streamed)[:1] if dist.get_rank() else list(streamed))
    pipe.step(torch.zeros(4, W), target=torch.zeros(4, W))  # and training goes on
    pipe.close()
    return only


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MESHES))
def test_on_processes_the_parts_of_all_ranks_are_one_folder(tmp_path: Path, kind: str) -> None:
    only = on_processes(2 if kind == "plain" else 4, saves, kind, str(tmp_path))
    assert [bool(names) for names in only] == ([False, True] if kind == "plain" else [False, False, True, False])
    is_saved(read(tmp_path / kind))
    assert [path.name for path in tmp_path.iterdir()] == [kind]


def fails(folder: str) -> str:
    from penstock.pipeline.model_state import save_pretrained

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    pipe = penstock.Pipeline(Layered(), stages=2, microbatches=2)
    if dist.get_rank() == 1:
        save_pretrained.write_file = full  # type: ignore[assignment]
    try:
        pipe.save_pretrained(Path(folder, "out"))
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.slow
def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    one, other = on_processes(2, fails, str(tmp_path))
    assert one == other
    assert "rank 1 could not save" in one
    assert "No space left" in one
    assert list(tmp_path.iterdir()) == []
