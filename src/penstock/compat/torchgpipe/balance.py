"""How many layers each partition should have: by their time, or by their memory.

Each layer of a copy is measured by itself on one device: the model stays as it is, and only one layer at a time has to
fit there. The best partition of what was measured is then found exactly.
"""

from __future__ import annotations

import copy
import statistics
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.compat.torchgpipe.errors import WrongTypeError
from penstock.devices import accelerator
from penstock.errors import UsageError
from penstock.model.balance.partition import counts_of, partition
from penstock.model.balance.profile import Weight, profile_layers
from penstock.rules import is_count

__all__ = ["balance_by_size", "balance_by_time"]

Device = torch.device | int | str
SLACK = 0.02  # measured times within this share of each other count as equal


def balance_by_time(
    partitions: int, module: nn.Sequential, sample: Any, *, timeout: float = 1.0, device: Device | None = None
) -> list[int]:
    """Count layers per partition, such that the slowest partition is as fast as possible.

    The layers are measured in rounds, until `timeout` seconds are over.

    Args:
        partitions: Number of partitions.
        module: The model.
        sample: A batch of any size.
        timeout: Seconds to measure.
        device: Where to measure. By default, a GPU if there is one.
    """
    _check(partitions, module)
    rounds: list[list[float]] = []
    begun = perf_counter()
    while not rounds or perf_counter() - begun < timeout:
        rounds.append([weight.milliseconds for weight in _weights(module, sample, device)])
    return _balanced([statistics.median(times) for times in zip(*rounds, strict=True)], partitions, slack=SLACK)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Count layers per partition, such that the largest partition needs as little memory as possible.

    A layer needs what autograd keeps of one microbatch, and `param_scale` times its parameters.

    Args:
        partitions: Number of partitions.
        module: The model.
        input: A batch.
        chunks: Microbatches per batch.
        param_scale: How many times its size a parameter takes: 2 with gradients, 3 with momentum, 4 with Adam.
        device: Where to measure. By default, a GPU if there is one.
    """
    _check(partitions, module)
    first = pytree.tree_map_only(Tensor, lambda tensor: tensor.chunk(chunks)[0], input)
    weights = _weights(module, first, device)
    return _balanced([each.activation_bytes + param_scale * each.parameter_bytes for each in weights], partitions)


def _check(partitions: int, module: Any) -> None:
    if not isinstance(module, nn.Sequential):
        raise WrongTypeError(f"an nn.Sequential can be balanced; this is a {type(module).__name__}")
    if not is_count(partitions) or partitions < 1:
        raise UsageError(f"partitions={partitions!r}: pass a whole number of at least 1")
    if len(module) < partitions:
        raise UsageError(f"{len(module)} layers cannot make {partitions} partitions; pass at most {len(module)}")
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise UsageError(
            "parameters of the model have gradients, which the copies would have as well; zero_grad() first"
        )


def _weights(module: nn.Sequential, sample: Any, device: Device | None) -> list[Weight]:
    """Measure each layer once, on what the one before returns; on a copy, so that the model stays as it is."""
    where = torch.device(device if device is not None else accelerator() or "cpu")
    layers = [(str(number), layer) for number, layer in enumerate(copy.deepcopy(module).train())]
    return profile_layers(layers, (sample,), rounds=1, device=where)


def _balanced(weights: list[float], partitions: int, slack: float = 0.0) -> list[int]:
    return counts_of(partition(weights, partitions, slack=slack).cuts, len(weights))
