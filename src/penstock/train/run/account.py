"""One account of what a rank holds: a dry run and a plan find out its parts in their own ways, and add them up here."""

from __future__ import annotations

from penstock.model.balance.profile import OPTIMIZERS
from penstock.train.config.settings import TrainConfig
from penstock.train.run.memory import Memory


def optimizer_states(config: TrainConfig) -> float:
    """How often as many bytes as the trained parameters the optimizer keeps."""
    if config.optimizer.name == "adamw8bit":
        return OPTIMIZERS["adamw"] / 4  # a byte for four
    momentum = config.optimizer.name == "sgd" and config.optimizer.momentum
    return OPTIMIZERS["sgd-momentum" if momentum else config.optimizer.name]


def exchanged_bytes(weights: float, trained: float, replicas: int, sharded: bool) -> float:
    """What replicas need in a step besides: a copy of the gradients, or whole weights and gradients of shards."""
    if replicas == 1:
        return 0.0
    return (weights + trained) * replicas if sharded else trained


def rank_memory(
    weights: float, gradients: float, optimizer: float, activations: float | None, *, alone: float, copy: float
) -> Memory:
    """The memory of a rank, by kind.

    `alone` is what its process takes without a model, and `copy` what a checkpoint is written from.
    """
    process = alone + weights + gradients + optimizer + copy + (activations or 0.0)
    return Memory(weights, gradients, optimizer, activations, process)
