"""One account of what a rank holds: a dry run and a plan find out its parts in their own ways, and add them up here."""

from __future__ import annotations

from penstock.model.balance.profile import OPTIMIZERS
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.run.memory import Memory


def optimizer_states(config: TrainConfig) -> float:
    """Return how often as many bytes as the trained parameters the optimizer keeps."""
    if config.optimizer.name == "adamw8bit":
        return OPTIMIZERS["adamw"] / 4  # a byte for four
    momentum = config.optimizer.name == "sgd" and config.optimizer.momentum
    return OPTIMIZERS["sgd-momentum" if momentum else config.optimizer.name]


def exchanged_bytes(weights: float, trained: float, replicas: int, sharded: bool) -> float:
    """Count what replicas need in a step besides: a copy of the gradients, or whole weights and gradients of shards."""
    if replicas == 1:
        return 0.0
    return (weights + trained) * replicas if sharded else trained


def rank_memory(
    weights: float,
    gradients: float,
    optimizer: float,
    activations: float | None,
    *,
    alone: float,
    copy: float,
    together: float | None = None,
) -> Memory:
    """Add up the memory of a rank, by kind.

    `alone` is what its process takes without a model, and `copy` what a checkpoint is written from. `together` is the
    most that gradients and activations take at one time, where that is known: without accumulation, gradients come
    with the first backwards, when a rank may hold fewer activations already.
    """
    passing = gradients + (activations or 0.0) if together is None else together
    tensors = weights + optimizer + passing
    known = None if activations is None else tensors
    return Memory(weights, gradients, optimizer, activations, known, alone + tensors + copy)
