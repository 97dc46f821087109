"""Runs of the smallest GPT, and of a model that gives NaN, in this process with ranks as threads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.tools.train.config.consistent import check_consistent
from penstock.tools.train.config.read import load_config
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.launch.stopping import Stop
from penstock.tools.train.run.metrics import read_metrics
from penstock.tools.train.run.run_folder import RunFolder
from penstock.tools.train.worker import Job, train_here

TINY = [
    "model.options.layers=2",
    "model.options.width=16",
    "model.options.heads=2",
    "data.sequence=16",
    "data.batch=8",
    "pipeline.ranks=2",
    "pipeline.microbatches=4",
    "pipeline.workers=threads",
    "training.steps=8",
    "optimizer.warmup=2",
    "evaluation.every=4",
    "evaluation.batches=2",
    "checkpoint.every=3",
    "logging.every=4",
    "logging.tensorboard=off",
]


def config_of(folder: Path, text: Path, *changes: str) -> TrainConfig:
    config = load_config(None, [*TINY, f"data.source={text}", f"output={folder / 'run'}", *changes])
    check_consistent(config)
    return config


def trained(config: TrainConfig, resume: bool = False, stop: Stop | None = None) -> int:
    RunFolder(Path(config.output)).prepare(config, resume=resume, fresh=not resume).free()
    return train_here(Job(config, "penstock train mine.toml --resume"), stop or Stop())


def losses(config: TrainConfig) -> list[float]:
    lines = read_metrics(RunFolder(Path(config.output)).metrics)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


class Poisoned(nn.Module):
    """Gives NaN from one of its calls on."""

    def __init__(self, after: int, where: str = "forward", only: int = 10**9) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.after, self.where, self.only, self.calls = after, where, only, 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        bad = self.training and self.after <= self.calls < self.after + self.only
        self.calls += self.training
        if bad and self.where == "forward":
            return out * math.nan
        if bad and self.where == "backward":
            out = out + torch.sqrt(out.detach() * 0 + (out - out)).sum() * 0.0  # 0 * inf in its gradient
        return out


def poisoned(after: int = 8, where: str = "forward", only: int = 10**9) -> tuple[nn.Module, Any]:
    layers: list[nn.Module] = [nn.Linear(8, 8), nn.Linear(8, 8), Poisoned(after, where, only), nn.Linear(8, 8)]
    return nn.Sequential(*layers), nn.functional.mse_loss


class Numbers:
    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(8, 8, generator=generator), torch.zeros(8, 8)

    def validation(self, number: int) -> tuple[Tensor, Tensor]:
        return self.batch(1000 + number)


def bad_from_the_start() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].bias[3] = math.nan
    return model, nn.functional.mse_loss
