"""What a checkpoint is on disk: whole or not at all, refused when damaged, and never a way to run code."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from train_runs import Run

import penstock
from penstock.checkpoint.disk.manifest import MANIFEST, checkpoints_in, read_manifest, seal
from penstock.errors import CheckpointError, UsageError
from penstock.files import tensors as body_module

ONE = {"stages": 1, "schedule": "gpipe"}


@pytest.fixture(scope="module")
def run() -> Any:
    run = Run(**ONE)
    run.step()
    yield run
    run.close()


def names(directory: Path) -> list[str]:
    """What is there, the lock aside."""
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


@pytest.fixture
def saved(run: Run, tmp_path: Path) -> Path:
    penstock.save(tmp_path / "it", run.pipe, run.optimizer, step=1, extra={"a": torch.arange(3)})
    return tmp_path / "it"


# -- damage


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


# -- foreign and hostile


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


class Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


def forge(checkpoint: Path, **files: bytes) -> None:
    """Replace files and make the manifest agree, as somebody would who means harm."""
    manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    for name, content in files.items():
        name = name.replace("__", "-").replace("_", ".")
        (checkpoint / name).write_bytes(content)
        manifest["files"][name] = [len(content), f"{__import__('zlib').crc32(content):08x}"]
    body = {key: value for key, value in manifest.items() if key not in ("format", "version", "checksum")}
    (checkpoint / MANIFEST).write_bytes(seal(body))


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


def test_no_file_of_a_checkpoint_is_a_pickle(saved: Path) -> None:
    for file in saved.iterdir():
        assert file.suffix in (".json", ".safetensors")
        with pytest.raises(pickle.UnpicklingError):
            pickle.loads(file.read_bytes())


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


def test_a_file_name_with_a_path_in_the_manifest_is_refused(run: Run, saved: Path) -> None:
    manifest = json.loads((saved / MANIFEST).read_bytes())
    manifest["files"]["../outside"] = [0, "00000000"]
    body = {key: value for key, value in manifest.items() if key not in ("format", "version", "checksum")}
    (saved / MANIFEST).write_bytes(seal(body))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        penstock.load(saved, run.pipe)


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


# -- fitting


def test_what_does_not_fit_is_listed_at_once(run: Run, saved: Path) -> None:
    other = penstock.Pipeline(nn.Sequential(nn.Linear(3, 3)), stages=1, microbatches=1)
    with pytest.raises(
        CheckpointError, match=r"(?s)does not fit.*50 of its tensors are not in the model: .*0\.weight is not in it"
    ):
        penstock.load(saved, other)
    half = Run(**ONE)
    for module in half.pipe.deployment.ranks.modules().values():
        module.double()
    with pytest.raises(CheckpointError, match=r"embed.weight is float32 in it and float64 in the model"):
        penstock.load(saved, half.pipe)


def test_a_wrong_optimizer_or_a_missing_part_is_refused(run: Run, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="state of AdamW, and optimizer= is SGD"):
        penstock.load(saved, run.pipe, torch.optim.SGD(run.pipe.parameters()))
    with pytest.raises(CheckpointError, match="saved without scheduler="):
        penstock.load(saved, run.pipe, scheduler=run.scheduler)
    penstock.save(tmp_path / "bare", run.pipe)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        penstock.load(tmp_path / "bare", run.pipe, run.optimizer)
    with pytest.raises(UsageError, match="does not own"):
        penstock.save(tmp_path / "y", run.pipe, torch.optim.SGD([nn.Parameter(torch.zeros(2))]))
    with pytest.raises(UsageError, match="not a penstock"):
        penstock.save(tmp_path / "y", nn.Linear(2, 2))  # type: ignore[arg-type]


# -- a directory of them


def test_keep_last_and_keep_every(run: Run, tmp_path: Path) -> None:
    with penstock.Checkpointer(tmp_path, keep_last=2, keep_every=4) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, run.pipe)
        checkpointer.wait()
        assert names(tmp_path) == [f"step-{step:08d}" for step in (4, 6, 7)]
        assert checkpointer.latest() == tmp_path / "step-00000007"


def test_a_step_that_is_saved_again_replaces_the_first_only_when_it_is_whole(run: Run, tmp_path: Path) -> None:
    with penstock.Checkpointer(tmp_path) as checkpointer:
        for number in range(3):
            checkpointer.save(5, run.pipe, extra=number)
        checkpointer.wait()
        assert len(checkpoints_in(tmp_path)) == 1
        assert checkpointer.load(run.pipe).extra == 2


def test_who_goes_back_and_trains_on_resumes_from_there(run: Run, tmp_path: Path) -> None:
    """The newest is the one that was saved last, not the one with the highest step; and it is not deleted at once."""
    with penstock.Checkpointer(tmp_path, keep_last=2) as checkpointer:
        for step in (100, 200, 300):
            checkpointer.save(step, run.pipe)
        checkpointer.save(150, run.pipe)
    with penstock.Checkpointer(tmp_path, keep_last=2) as checkpointer:
        assert checkpointer.load(run.pipe).step == 150
        checkpointer.save(160, run.pipe)
        checkpointer.wait()
        assert names(tmp_path) == ["step-00000150", "step-00000160"]


def test_a_torn_one_is_passed_over_and_said(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with penstock.Checkpointer(tmp_path, async_save=False) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, run.pipe, extra=step)
        (tmp_path / "step-00000004" / "index.json").unlink()
        assert checkpointer.latest() == tmp_path / "step-00000003"
        assert "step-00000004/index.json is missing" in caplog.text
        file = tmp_path / "step-00000003" / "process-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1  # only the checksum can tell
        file.write_bytes(content)
        caplog.clear()
        assert checkpointer.load(run.pipe).step == 2
        assert f"{file} is damaged" in caplog.text
        with pytest.raises(CheckpointError, match="step-00000003 is not complete"):
            checkpointer.load(run.pipe, path=tmp_path / "step-00000003")
        shutil.rmtree(tmp_path / "step-00000002")
        with pytest.raises(CheckpointError, match="not complete"):
            checkpointer.load(run.pipe)
        shutil.rmtree(tmp_path / "step-00000003")
        with pytest.raises(CheckpointError, match="no complete checkpoint; 1 are damaged"):
            checkpointer.load(run.pipe)


def test_two_runs_cannot_write_to_one_directory(run: Run, tmp_path: Path) -> None:
    one, two = penstock.Checkpointer(tmp_path), penstock.Checkpointer(tmp_path)
    one.save(1, run.pipe)
    with pytest.raises(CheckpointError, match="another Checkpointer of this process"):
        two.save(1, run.pipe)
    one.close()
    two.save(2, run.pipe)
    two.close()
    with pytest.raises(UsageError, match="is closed"):
        one.save(3, run.pipe)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


# -- in the background


def test_only_the_copy_holds_training_up(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is held back here, and save() returns all the same; what is written is what was there at save()."""
    go = threading.Event()
    write = os.write
    threads = set()

    def slow(descriptor: int, content: Any) -> int:
        threads.add(threading.current_thread())
        assert go.wait(30)
        return write(descriptor, content)

    monkeypatch.setattr(body_module.os, "write", slow)
    with penstock.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, run.pipe, run.optimizer, **run.parts())
        after = run.steps(2)
        assert names(tmp_path)[0].startswith(".step-00000001.")
        assert checkpointer.latest() is None
        checkpointer.save(3, run.pipe)  # a second copy, while the first is not even begun
        go.set()
        checkpointer.wait()
        assert threading.main_thread() not in threads
        checkpointer.load(run.pipe, run.optimizer, path=tmp_path / "step-00000001", **run.parts())
        assert run.steps(2) == after


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    write, left = os.write, [after]

    def limited(descriptor: int, content: Any) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = content[: left[0]]
        left[0] -= len(part)
        return write(descriptor, part)

    monkeypatch.setattr(body_module.os, "write", limited)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_full_disk_is_an_error_at_the_next_call_and_leaves_nothing_behind(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    with penstock.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, run.pipe, run.optimizer)
        checkpointer.wait()
        size = sum(file.stat().st_size for file in (tmp_path / "step-00000001").iterdir())
        fill_the_disk(monkeypatch, int(share * size))
        checkpointer.save(2, run.pipe, run.optimizer)
        with pytest.raises(CheckpointError, match=r"step 2 could not be saved .*No space left.*earlier checkpoints"):
            checkpointer.wait()
        checkpointer.wait()  # said once
        assert names(tmp_path) == ["step-00000001"]
        checkpointer.save(3, run.pipe)
        checkpointer._under_way[0][1].exception()
        with pytest.raises(CheckpointError, match="step 3 could not be saved"):
            checkpointer.save(4, run.pipe)
        monkeypatch.undo()
        checkpointer.save(5, run.pipe)
    assert names(tmp_path) == ["step-00000001", "step-00000005"]


def test_a_folder_that_became_read_only_is_an_error_that_says_what_was_not_saved(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "[Errno 30] Read-only file system" and no more."""
    with penstock.Checkpointer(tmp_path) as writer:
        writer.save(1, run.pipe, run.optimizer)
        writer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "mkdir", lambda *_, **__: os.mkdir("/proc/self/nowhere"))
            with pytest.raises(
                CheckpointError, match=r"step 2 could not be saved in .*; earlier checkpoints are unchanged"
            ):
                writer.save(2, run.pipe, run.optimizer)
    assert names(tmp_path) == ["step-00000001"]


def test_close_says_what_went_wrong(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = penstock.Checkpointer(tmp_path)
    fill_the_disk(monkeypatch, 0)
    checkpointer.save(1, run.pipe)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpointer.close()
    checkpointer.close()


def test_an_error_of_the_loop_is_not_hidden_by_one_of_a_save(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_the_disk(monkeypatch, 0)
    checkpointer = penstock.Checkpointer(tmp_path)

    def loop() -> None:
        with checkpointer:
            checkpointer.save(1, run.pipe)
            raise ZeroDivisionError("of the loop")

    with pytest.raises(ZeroDivisionError) as caught:
        loop()
    assert "No space left" in caught.value.__notes__[0]


def test_what_a_killed_run_left_is_cleared_away(run: Run, tmp_path: Path) -> None:
    (tmp_path / ".step-00000009.0badcafe").mkdir()
    (tmp_path / ".step-00000009.0badcafe" / "process-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".trash-step-00000001").mkdir()
    (tmp_path / "notes").mkdir()
    with penstock.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, run.pipe)
    assert names(tmp_path) == ["notes", "step-00000001"]


# -- other programs


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


def test_a_header_that_disagrees_with_the_index_is_refused(run: Run, saved: Path) -> None:
    tensors = load_file(saved / "process-00000.safetensors")
    tensors["model.embed.weight"] = tensors["model.embed.weight"].T.contiguous()
    save_file(tensors, saved / "process-00000.safetensors")
    forge(saved, process__00000_safetensors=(saved / "process-00000.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"process-00000.safetensors"):
        penstock.load(saved, run.pipe)


def test_a_save_that_failed_does_not_take_the_name(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with penstock.Checkpointer(tmp_path, async_save=False) as checkpointer:
        with monkeypatch.context() as patch:
            fill_the_disk(patch, 0)
            with pytest.raises(CheckpointError, match="No space left"):
                checkpointer.save(1, run.pipe)
        checkpointer.save(1, run.pipe)
    assert names(tmp_path) == ["step-00000001"]


def test_a_config_that_cannot_be_saved_leaves_nothing(run: Run, tmp_path: Path) -> None:
    with penstock.Checkpointer(tmp_path) as checkpointer:
        for config in ({"a": torch.zeros(2)}, {"b": object()}):
            with pytest.raises(UsageError, match="config"):
                checkpointer.save(1, run.pipe, config=config)
    assert names(tmp_path) == []


# -- odd models and optimizers


class Odd(nn.Module):
    """An empty buffer, a scalar, a transposed parameter, a half, extra state, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("halves", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.count: Any = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.scale * (x @ self.weight)

    def get_extra_state(self) -> Any:
        return {"count": self.count, "seen": torch.tensor([self.count])}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]
        assert state["seen"].item() == self.count


def odd_pipe() -> penstock.Pipeline:
    stages = [Odd(), nn.Linear(2, 2)]
    return penstock.Pipeline(stages, microbatches=2, loss_fn=nn.functional.mse_loss)


def test_odd_models_come_back_as_they_were(tmp_path: Path) -> None:
    pipe = odd_pipe()
    pipe.step(torch.randn(4, 3), target=torch.randn(4, 2))
    penstock.save(tmp_path / "odd", pipe)
    want = {name: value.clone() for name, value in pipe.state_dict().items() if isinstance(value, torch.Tensor)}
    pipe.close()
    other = odd_pipe()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    loaded = penstock.load(tmp_path / "odd", other)
    assert loaded.step == 0
    odd = other.deployment.staged.parts[0].module
    assert odd.count == 2
    assert not odd.weight.is_contiguous()  # what is here keeps its place in memory
    for name, value in other.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, want[name])
            assert value.dtype == want[name].dtype
    other.close()


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


def test_optimizers_of_every_kind_go_on_exactly(tmp_path: Path) -> None:
    """State with plain values, none at all, two optimizers, a learning rate that is a tensor, frozen parameters."""

    def lists(pipe: penstock.Pipeline) -> Any:
        first, *others = pipe.parameters()
        return [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.RMSprop(others, lr=1e-3)]

    def tensors(pipe: penstock.Pipeline) -> Any:
        return torch.optim.Adam(pipe.parameters(), lr=torch.tensor(1e-2), foreach=False)

    def frozen(pipe: penstock.Pipeline) -> Any:
        first, *others = pipe.parameters()
        first.requires_grad_(False)
        return torch.optim.Rprop(others)

    def made(pipe: penstock.Pipeline) -> Any:
        return torch.optim.LBFGS(pipe.parameters())

    x = torch.randn(4, 3)
    for number, make in enumerate((lists, tensors, frozen, lambda pipe: torch.optim.Adagrad(pipe.parameters()))):

        def trained(pipe: penstock.Pipeline, optimizer: Any) -> float:
            loss = pipe.step(x, target=x).loss.item()
            for each in optimizer if isinstance(optimizer, list) else [optimizer]:
                each.step()
                each.zero_grad()
            return loss

        runs = []
        for _ in range(2):
            torch.manual_seed(number)
            pipe = penstock.Pipeline([nn.Linear(3, 3), nn.Linear(3, 3)], microbatches=2, loss_fn=nn.functional.mse_loss)
            runs.append((pipe, make(pipe)))
        for _ in range(2):
            trained(*runs[0])
        penstock.save(tmp_path / str(number), *runs[0])
        penstock.load(tmp_path / str(number), *runs[1])
        assert [trained(*runs[0]) for _ in range(2)] == [trained(*runs[1]) for _ in range(2)]
        for pipe, _ in runs:
            pipe.close()
    strange = made(pipe := odd_pipe())
    strange.state["line search"] = {"tries": 3}
    with pytest.raises(UsageError, match="keeps state under 'line search'"):
        penstock.save(tmp_path / "strange", pipe, strange)


def test_an_index_of_somebody_elses_is_refused_by_name(run: Run, saved: Path) -> None:
    index = json.loads((saved / "index.json").read_bytes())
    for change in ({"processes": []}, {"processes": [{}]}, {"processes": [[1]]}, {"processes": 7}):
        forge(saved, index_json=json.dumps({**index, **change}).encode())
        with pytest.raises(CheckpointError, match=r"index\.json"):
            penstock.load(saved, run.pipe, run.optimizer)


def test_every_generator_goes_on_where_it_was(run: Run, tmp_path: Path) -> None:
    import random

    import numpy

    def drawn() -> list[Any]:
        return [torch.rand(2).tolist(), random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.normal()]

    before = numpy.random.get_bit_generator()
    for generator in (numpy.random.MT19937(3), numpy.random.PCG64(4)):
        numpy.random.set_bit_generator(generator)
        try:
            drawn()  # an odd number of normal ones: half a pair is kept inside
            penstock.save(tmp_path / type(generator).__name__, run.pipe)
            want = drawn()
            drawn()
            assert penstock.load(tmp_path / type(generator).__name__, run.pipe).generators == "own"
            assert drawn() == want
        finally:
            numpy.random.set_bit_generator(before)
