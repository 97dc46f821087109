"""Where a configuration trains on this machine, and in which precision by default."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from penstock.devices import accelerator
from penstock.tools.train.config.settings import TrainConfig


def device_of(config: TrainConfig) -> str | None:
    """Return the kind of accelerator that a run uses here; None for the CPU."""
    return accelerator() if config.pipeline.device == "auto" else None


def precision_of(config: TrainConfig) -> Literal["fp32", "bf16", "fp16"]:
    """Return the precision of forwards: unless it is set, bf16 on an accelerator and fp32 on the CPU."""
    if config.pipeline.precision != "auto":
        return config.pipeline.precision
    return "fp32" if device_of(config) is None else "bf16"


def on_cpu(config: TrainConfig) -> TrainConfig:
    """Return the same on the CPU, in the precision of the run: for what is built to be looked at."""
    return replace(config, pipeline=replace(config.pipeline, device="cpu", precision=precision_of(config)))
