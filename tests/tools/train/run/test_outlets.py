"""Where figures go: TensorBoard, Weights & Biases, a function of the user's."""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.tools.train.config.read import load_config
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.run.metrics import Metrics
from penstock.tools.train.run.outlets import open_outlets


def config_of(*changes: str) -> TrainConfig:
    return load_config(None, ["logging.tensorboard=off", *changes])


class Board:
    """As TensorBoard's writer."""

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.told: list[Any] = []
        boards.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.told.append((name, value, step))

    def close(self) -> None:
        self.told.append("closed")


boards: list[Board] = []


def test_tensorboard_is_told_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Board  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    outlets = open_outlets(config_of("logging.tensorboard=auto"), tmp_path, 4)
    metrics = Metrics(tmp_path / "m.jsonl", 4, outlets)
    metrics.write(5, loss=1.5, memory=[1, 2], norm=float("nan"), mfu=None)
    metrics.close()
    (board,) = boards
    assert (board.folder, board.purge_step) == (str(tmp_path / "tensorboard"), 5)
    assert board.told == [("loss", 1.5, 5), ("memory/rank0", 1, 5), ("memory/rank1", 2, 5), "closed"]


def test_what_is_not_installed_is_left_out_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert open_outlets(config_of("logging.tensorboard=auto"), tmp_path, 0) == []
    with pytest.raises(UsageError, match="pip install tensorboard"):
        open_outlets(config_of("logging.tensorboard=on"), tmp_path, 0)
    with pytest.raises(UsageError, match=r"wandb is not installed: pip install .penstock\[wandb\]"):
        open_outlets(config_of("logging.wandb=offline"), tmp_path, 0)


def test_a_function_is_given_every_steps_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "seen = []\n"
        "def look(figures):\n"
        "    if figures['step'] == 2: raise OSError('disk full')\n"
        "    seen.append(figures)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    metrics = Metrics(tmp_path / "m.jsonl", 0, open_outlets(config_of("logging.callback=mine:look"), tmp_path, 0))
    metrics.write(1, loss=1.5, memory=[7], validation=None)
    assert sys.modules["mine"].seen == [{"step": 1, "loss": 1.5, "memory": [7]}]
    with pytest.raises(UsageError, match="mine:look raised OSError in step 2: disk full; catch in it what must not"):
        metrics.write(2, loss=1.0)
    metrics.close()
    with pytest.raises(UsageError, match=r"logging.callback: mine has no lok; it has look, seen"):
        open_outlets(config_of("logging.callback=mine:lok"), tmp_path, 0)


@pytest.mark.slow
def test_weights_and_biases_keeps_a_run_offline_and_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real wandb, without network: what it wrote is read back from its own file."""
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    config = config_of("logging.wandb=offline", "logging.wandb_options={project='trials', name='first'}")
    root = tmp_path / "run"
    root.mkdir()
    for start in (0, 2):
        metrics = Metrics(root / "m.jsonl", start, open_outlets(config, root, start))
        for step in (start + 1, start + 2):
            metrics.write(step, loss=1 / step, memory=[5, 6])
        metrics.close()
    files = sorted(root.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    name = json.loads((root / "wandb.json").read_text())["id"]
    assert all(file.name == f"run-{name}.wandb" for file in files)  # one run there, however often it is resumed
    wait_for(lambda: all(kinds(file)[-1:] == ["exit"] for file in files))  # wandb's process writes it after `finish`
    assert [logged(file) for file in files] == [[(1, 1.0, 5), (2, 0.5, 5)], [(3, 1 / 3, 5), (4, 0.25, 5)]]
    with pytest.raises(UsageError, match=r"logging.wandb_options: wandb.init does not take them"):
        open_outlets(config_of("logging.wandb=offline", "logging.wandb_options={colour='red'}"), root, 0)


def wait_for(done: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)


def kinds(file: Path) -> list[str | None]:
    return [record.WhichOneof("record_type") for record in records(file)]


def logged(file: Path) -> list[tuple[int, float, int]]:
    """(step, loss, memory of rank 0) of each line."""
    found = []
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.append((items["_step"], items["loss"], items["memory/rank0"]))
    return found


def records(file: Path) -> list[Any]:
    """Those that are whole; a short file is a header and records, each with its own."""
    from wandb.proto import wandb_internal_pb2

    data, place, found = file.read_bytes(), 7, []
    assert len(data) < 32768  # one block
    while place + 7 < len(data):
        start = place + 7
        place = start + int.from_bytes(data[place + 4 : place + 6], "little")
        if place <= len(data):
            found.append(wandb_internal_pb2.Record.FromString(data[start:place]))
    return found
