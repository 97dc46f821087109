"""Everything that tunes a run, on processes: the numbers of one process, and of a run that was never stopped."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import on_processes
from train_jobs import StopAt

from penstock.checkpoint.difference import compare
from penstock.checkpoint.disk.manifest import find_checkpoint
from penstock.tools.train.config.consistent import check_consistent
from penstock.tools.train.config.read import load_config
from penstock.tools.train.launch.stopping import INTERRUPTED
from penstock.tools.train.run.metrics import read_metrics
from penstock.tools.train.run.run_folder import RunFolder
from penstock.tools.train.worker import Job, train_here

MINE = """
import torch
from torch import nn


def model():
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers).to(torch.float64), nn.functional.mse_loss


class Rows:
    def batch(self, number):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        return x, torch.sin(3 * x)

    def validation(self, number):
        return self.batch(1000 + number)
"""
TUNED = [
    "model.source=mine:model",
    "data.source=mine:Rows",
    "data.batch=16",
    "pipeline.microbatches=2",
    "training.steps=6",
    "training.accumulate=2",
    "training.freeze=['1.0.weight']",
    "training.ema=0.5",
    "optimizer.lr=0.02",
    "optimizer.layer_decay=0.7",
    "optimizer.groups={'3.*' = {lr = 0.03, weight_decay = 0}}",
    "optimizer.warmup=1",
    "optimizer.decay=wsd",
    "optimizer.decay_share=0.5",
    "evaluation.every=2",
    "evaluation.patience=2",
    "checkpoint.every=3",
    "logging.every=3",
    "logging.tensorboard=off",
]


def train(folder: str, output: str, layout: list[str], resume: bool = False, stop: int = 1000) -> int:
    """One run, in this process as it is: a rank of a group, or alone with ranks as threads."""
    import torch.distributed as dist

    os.chdir(folder)
    sys.path.insert(0, folder)
    config = load_config(None, [*TUNED, *layout, f"output={output}"])
    check_consistent(config)
    group = dist.is_initialized()
    if group:
        os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    if not group or dist.get_rank() == 0:
        RunFolder(Path(output)).prepare(config, resume=resume, fresh=False).free()
    if group:
        dist.barrier()
    return train_here(Job(config, ""), StopAt(stop))


def straight_and_parted(folder: str, layout: list[str]) -> list[int]:
    """A run in one go, and one that was stopped in its third step and went on."""
    codes = [train(folder, "straight", layout), train(folder, "parted", layout, stop=3)]
    return [*codes, train(folder, "parted", layout, resume=True)]


def figures(output: Path, *names: str) -> list[dict[str, Any]]:
    wanted = ("step", *names)
    lines = read_metrics(output / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name in wanted} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (2, ["pipeline.ranks=2"]),
        (4, ["pipeline.ranks=2", "mesh.replicas=2", "mesh.replicate=fsdp"]),
    ],
)
def test_processes_are_tuned_as_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, layout: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    codes = on_processes(processes, straight_and_parted, str(tmp_path), layout)
    assert codes == [[0, INTERRUPTED, 0]] * processes
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    one = ["pipeline.ranks=1", "pipeline.stages=1", "pipeline.workers=threads"]
    assert train(str(tmp_path), "alone", one) == 0
    names = ("loss", "norm", "lr", "validation")
    straight = figures(tmp_path / "straight", *names)
    assert [line["step"] for line in straight if "validation" in line] == [2, 4, 6]
    for found, wanted in zip(straight, figures(tmp_path / "alone", *names), strict=True):
        assert found == pytest.approx(wanted, rel=1e-11)
    assert straight == figures(tmp_path / "parted", *names)
    assert not compare(find_checkpoint(tmp_path / "straight"), find_checkpoint(tmp_path / "parted")).changes
    alone = compare(find_checkpoint(tmp_path / "straight"), find_checkpoint(tmp_path / "alone"))
    assert all(
        (change.largest or 0) < 1e-11 for change in alone.changes if change.name.startswith(("model.", "average."))
    )
    best = find_checkpoint(tmp_path / "straight" / "best").name
    assert (
        best == find_checkpoint(tmp_path / "parted" / "best").name == find_checkpoint(tmp_path / "alone" / "best").name
    )
