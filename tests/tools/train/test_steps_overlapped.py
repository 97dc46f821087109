"""`pipeline.overlap_steps`: a run whose steps overlap has the losses, norms and weights of one whose steps do not."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import on_processes

from penstock.checkpoint.difference import compare
from penstock.checkpoint.disk.manifest import find_checkpoint
from penstock.errors import UsageError
from penstock.tools.train.config.consistent import check_consistent
from penstock.tools.train.config.read import load_config
from penstock.tools.train.launch.stopping import Stop
from penstock.tools.train.run.metrics import read_metrics
from penstock.tools.train.run.run_folder import RunFolder
from penstock.tools.train.steps import MOST, stretch
from penstock.tools.train.worker import Job, train_here

MINE = """
import torch
from torch import nn


def model():
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers).to(torch.float64), nn.functional.mse_loss


class Rows:
    def batch(self, number):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        y = torch.sin(3 * x) * (30 if number == 6 else 1)
        return x, y * (float("inf") if number == 17 else 1)

    def validation(self, number):
        return self.batch(1000 + number)
"""
TUNED = [
    "model.source=mine:model",
    "data.source=mine:Rows",
    "data.batch=16",
    "pipeline.ranks=2",
    "pipeline.microbatches=4",
    "pipeline.schedule=zb-v",
    "training.steps=20",
    "training.nonfinite=skip",
    "optimizer.lr=0.02",
    "optimizer.clip=1.0",
    "optimizer.warmup=1",
    "evaluation.every=12",
    "checkpoint.every=15",
    "logging.every=10",
    "logging.tensorboard=off",
]


def train(folder: str, overlap: bool, *settings: str) -> int:
    import torch.distributed as dist

    os.chdir(folder)
    sys.path.insert(0, folder)
    own = [f"pipeline.overlap_steps={str(overlap).lower()}", f"output=run-{overlap}"]
    config = load_config(None, [*TUNED, *own, *settings])
    check_consistent(config)
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    if dist.get_rank() == 0:
        RunFolder(Path(config.output)).prepare(config, resume=False, fresh=False).free()
    dist.barrier()
    return train_here(Job(config, ""), Stop())


def both(folder: str, *settings: str) -> list[int]:
    return [train(folder, overlap, *settings) for overlap in (False, True)]


def said(folder: Path, run: str) -> list[dict[str, Any]]:
    names = ("step", "loss", "lr", "norm", "validation", "skipped")
    lines = read_metrics(RunFolder(folder / run).metrics)
    return [{name: repr(line.get(name)) for name in names} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_on_processes_whose_steps_overlap_is_the_run_whose_steps_do_not(tmp_path, replicas):
    """Twenty steps: clipped hard in the seventh, left out in the eighteenth, evaluated and saved in between."""
    (tmp_path / "mine.py").write_text(MINE)
    processes = 2 * replicas
    assert on_processes(processes, both, str(tmp_path), f"mesh.replicas={replicas}") == [[0, 0]] * processes
    plain, overlapped = said(tmp_path, "run-False"), said(tmp_path, "run-True")
    assert overlapped == plain
    assert len(plain) == 20
    assert [line["step"] for line in plain if line["skipped"] == "True"] == ["18"]
    one, other = (find_checkpoint(RunFolder(tmp_path / f"run-{way}").checkpoints) for way in (False, True))
    assert compare(one, other).changes == []


def test_steps_overlap_from_one_thing_that_all_ranks_do_to_the_next():
    config = load_config(None, [*TUNED, "pipeline.overlap_steps=true"])
    assert stretch(config, step=3, unrecorded=100) == 12 - 3
    assert stretch(config, step=13, unrecorded=100) == 15 - 13
    assert stretch(config, step=3, unrecorded=4) == 4
    assert stretch(config, step=18, unrecorded=100) == 20 - 18
    long = load_config(None, [*TUNED, "pipeline.overlap_steps=true", "training.steps=900", "evaluation.every=0"])
    assert stretch(long, step=15 * 20, unrecorded=MOST) == 15
    assert stretch(load_config(None, TUNED), step=3, unrecorded=100) == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("training.accumulate=2", "training.accumulate"),
        ("training.ema=0.9", "training.ema"),
        ("pipeline.precision=fp16", "bf16"),
        ("mesh.replicate=fsdp", "mesh.replicate"),
    ],
)
def test_what_ends_steps_on_all_ranks_together_is_refused_by_name(change, named):
    config = load_config(None, [*TUNED, "pipeline.overlap_steps=true", "mesh.replicas=2", change])
    with pytest.raises(UsageError, match=r"pipeline\.overlap_steps") as refused:
        check_consistent(config)
    assert named in str(refused.value)
