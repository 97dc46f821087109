"""Loading: all of a checkpoint or none of it, whoever wrote it."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.saved_files import Evil, forge
from processes import on_processes
from safetensors.torch import load_file, save_file
from torch import nn
from train_runs import LAYOUTS, Run

import penstock
from penstock.checkpoint.disk.manifest import MANIFEST
from penstock.errors import CheckpointError, UsageError


def test_a_refused_checkpoint_leaves_the_model_as_it_was(run: Run, saved: Path) -> None:
    run.step()
    before = {name: value.clone() for name, value in run.pipe.state_dict().items()}
    file = saved / "process-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)
    with pytest.raises(CheckpointError):
        penstock.load(saved, run.pipe, run.optimizer)
    assert all(torch.equal(value, before[name]) for name, value in run.pipe.state_dict().items())


def resume_past_a_torn_one(folder: str) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock.checkpoint").addHandler(handler)
    run = Run(**LAYOUTS["two stages"])
    with penstock.Checkpointer(folder, async_save=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, run.pipe)
        if dist.get_rank() == 0:
            (Path(folder) / "step-00000002" / "index.json").unlink()
        dist.barrier()
        assert checkpointer.latest() == Path(folder) / "step-00000001"
        assert checkpointer.load(run.pipe).step == 1
        assert checkpointer.latest() == Path(folder) / "step-00000001"
    run.close()
    return lines


def test_what_is_passed_over_is_said_once(tmp_path: Path) -> None:
    """All processes see the same folder, and each said so, whenever it looked."""
    (one,), other = on_processes(2, resume_past_a_torn_one, str(tmp_path))
    assert one.startswith("skipped: ")
    assert "step-00000002/index.json is missing" in one
    assert other == []


def test_a_forged_checkpoint_runs_no_code(run: Run, saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "code ran"
    evil = pickle.dumps(Evil(mark))
    pickle.loads(evil)
    assert mark.exists()  # the pickle does what it says
    mark.rmdir()
    index = (saved / "index.json").read_bytes()
    forge(saved, index_json=evil)
    with pytest.raises(CheckpointError, match=r"index.json"):
        penstock.load(saved, run.pipe)
    forge(saved, index_json=index, process__00000_safetensors=evil)
    with pytest.raises(CheckpointError, match=r"process-00000.safetensors"):
        penstock.load(saved, run.pipe)
    (saved / ".metadata").write_bytes(evil)
    (saved / MANIFEST).write_bytes(evil)
    with pytest.raises(CheckpointError, match=r"manifest.json"):
        penstock.load(saved, run.pipe)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors["model.embed.weight"].update(dtype="load"), "index"),
        (lambda tensors: tensors["model.embed.weight"]["chunks"].clear(), "do not cover"),
        (lambda tensors: tensors["model.embed.weight"]["chunks"][0].update(file="../../etc/passwd"), "plain file name"),
        (lambda tensors: tensors["model.embed.weight"]["chunks"][0].update(offsets=[-1, 0]), "a piece at"),
        (lambda tensors: tensors["model.embed.weight"].update(shape=[12, 9]), "do not cover"),
        (lambda tensors: tensors["model.embed.weight"].update(dtype="float64"), "float64"),
        (lambda tensors: tensors["model.embed.weight"]["chunks"][0].update(file="other.safetensors"), "other"),
        (lambda tensors: tensors.pop("model.embed.weight"), "embed.weight is not in it"),
        (
            lambda tensors: tensors.update({"model.more": tensors["model.embed.weight"]}),
            "1 of its tensors are not in the model: more",
        ),
    ],
)
def test_an_index_that_lies_is_an_error_with_a_name(run: Run, saved: Path, change: Any, message: str) -> None:
    index = json.loads((saved / "index.json").read_bytes())
    change(index["tensors"])
    forge(saved, index_json=json.dumps(index).encode())
    with pytest.raises(CheckpointError, match=message):
        penstock.load(saved, run.pipe)


def test_a_header_that_disagrees_with_the_index_is_refused(run: Run, saved: Path) -> None:
    tensors = load_file(saved / "process-00000.safetensors")
    tensors["model.embed.weight"] = tensors["model.embed.weight"].T.contiguous()
    save_file(tensors, saved / "process-00000.safetensors")
    forge(saved, process__00000_safetensors=(saved / "process-00000.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"process-00000.safetensors"):
        penstock.load(saved, run.pipe)


def test_a_model_without_values_is_loaded_into_and_not_saved(run: Run, tmp_path: Path) -> None:
    model = [nn.Linear(3, 3), nn.Linear(3, 3)]
    pipe = penstock.Pipeline(model, microbatches=2, loss_fn=nn.functional.mse_loss)
    penstock.save(tmp_path / "it", pipe)
    with penstock.lazy():
        empty = [nn.Linear(3, 3), nn.Linear(3, 3)]
    lazily = penstock.Pipeline(empty, microbatches=2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(UsageError, match="have no values yet"):
        penstock.save(tmp_path / "no", lazily)
    penstock.load(tmp_path / "it", lazily)
    x = torch.randn(4, 3)
    assert lazily.step(x, target=x).loss == pipe.step(x, target=x).loss


def test_loading_forgets_gradients_of_other_values(run: Run, saved: Path) -> None:
    batch = run.data.next()
    run.pipe.step(batch, target=batch)
    penstock.load(saved, run.pipe)
    assert all(parameter.grad is None for parameter in run.pipe.parameters())


def test_an_index_of_somebody_elses_is_refused_by_name(run: Run, saved: Path) -> None:
    index = json.loads((saved / "index.json").read_bytes())
    for change in ({"processes": []}, {"processes": [{}]}, {"processes": [[1]]}, {"processes": 7}):
        forge(saved, index_json=json.dumps({**index, **change}).encode())
        with pytest.raises(CheckpointError, match=r"index\.json"):
            penstock.load(saved, run.pipe, run.optimizer)
