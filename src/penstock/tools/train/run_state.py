"""What a run trains, and what its checkpoints therefore hold: one value that the worker builds and the loop uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from penstock.pipeline import Pipeline
from penstock.runtime.optim.scaler import GradScaler
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.data.batch import DataBatches
from penstock.tools.train.updates.ema import WeightAverage
from penstock.tools.train.updates.optimizer import build_optimizer
from penstock.tools.train.updates.rate import build_rate


@dataclass(frozen=True)
class RunState:
    """The pipeline of a run with its optimizer, learning rate and data, on this process."""

    config: TrainConfig
    pipe: Pipeline
    data: DataBatches
    optimizer: torch.optim.Optimizer
    rate: LambdaLR
    scaler: GradScaler | None  # Only fp16 has one.
    average: WeightAverage | None  # Only training.ema has one.

    @classmethod
    def of(cls, config: TrainConfig, pipe: Pipeline, data: DataBatches) -> RunState:
        """Make the state with which a run begins."""
        optimizer = build_optimizer(config, pipe)
        return cls(
            config,
            pipe,
            data,
            optimizer,
            build_rate(config, optimizer),
            GradScaler(pipe) if config.pipeline.precision == "fp16" else None,
            None if config.training.ema is None else WeightAverage(pipe, config.training.ema),
        )

    @property
    def saved(self) -> dict[str, Any]:
        """What a `Checkpointer` saves and loads beside the pipeline and the optimizer."""
        averages = None if self.average is None else self.average.tensors
        return {"scheduler": self.rate, "scaler": self.scaler, "data": self.data, "averages": averages}
