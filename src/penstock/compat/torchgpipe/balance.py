"""How many layers each partition should have: by their time, or by their memory.

Each layer is measured by itself, as a copy, on one device: the model stays as it is, and only one layer at a time has
to fit there. The best partition of what was measured is then found exactly.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.compat.torchgpipe.errors import WrongTypeError
from penstock.devices import accelerator
from penstock.errors import UsageError
from penstock.model.balance.measure import measure
from penstock.model.balance.partition import counts_of, partition
from penstock.model.declared_skips import use_skips
from penstock.model.random_states import random_state, restore_random
from penstock.model.run_kind import DRY, run_as
from penstock.rules import is_count

__all__ = ["balance_by_size", "balance_by_time"]

Device = torch.device | int | str
SLACK = 0.02  # measured times within this share of each other count as equal


def balance_by_time(
    partitions: int, module: nn.Sequential, sample: Any, *, timeout: float = 1.0, device: Device | None = None
) -> list[int]:
    """Layers per partition, such that the slowest partition is as fast as possible.

    The layers are measured in rounds, until `timeout` seconds are over.

    Args:
        partitions: Number of partitions.
        module: The model.
        sample: A batch of any size.
        timeout: Seconds to measure.
        device: Where to measure. By default, a GPU if there is one.
    """
    _check(partitions, module)
    times: list[list[float]] = [[] for _ in module]
    begun = perf_counter()
    while not times[0] or perf_counter() - begun < timeout:
        for number, (layer, value) in enumerate(_layer_by_layer(module, sample, device)):
            found = measure(layer, {"": layer}, [""], lambda layer=layer, value=value: layer(value), rounds=1)  # type: ignore[misc]
            times[number].append(found[0].seconds)
    return _balanced([statistics.median(each) for each in times], partitions, slack=SLACK)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Layers per partition, such that the largest partition needs as little memory as possible.

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
    sizes = []
    for layer, value in _layer_by_layer(module, first, device):
        parameters = sum(parameter.numel() * parameter.element_size() for parameter in layer.parameters())
        sizes.append(_kept_bytes(layer, value) + param_scale * parameters)
    return _balanced(sizes, partitions)


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


def _layer_by_layer(module: nn.Sequential, value: Any, device: Device | None) -> Iterator[tuple[nn.Module, Any]]:
    """A copy of each layer in training mode, and what it is called with; skips wait as in a forward of the model."""
    where = torch.device(device if device is not None else accelerator() or "cpu")
    value = _leaves(pytree.tree_map_only(Tensor, lambda tensor: tensor.to(where), value))
    table: dict[Any, Any] = {}
    state = random_state()
    for original in module:
        layer = copy.deepcopy(original).to(where).train()
        with use_skips(table):
            yield layer, value
            with run_as(DRY):
                value = _leaves(layer(value))
        table = {key: _leaves(skip) for key, skip in table.items()}
    restore_random(state)


def _leaves(value: Any) -> Any:
    """A nested value without the graph behind its tensors."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def _kept_bytes(layer: nn.Module, value: Any) -> int:
    """What a forward leaves in memory: its output, and what autograd saves beside what was there before."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), run_as(DRY):
        made = layer(value)
    pytree.tree_map_only(Tensor, note, made)
    before = [*layer.parameters(), *layer.buffers(), *pytree.tree_leaves(value)]
    known = {tensor.untyped_storage()._cdata for tensor in before if isinstance(tensor, Tensor)}
    return sum(size for storage, size in kept.items() if storage not in known)


def _balanced(weights: list[float], partitions: int, slack: float = 0.0) -> list[int]:
    return counts_of(partition(weights, partitions, slack=slack).cuts, len(weights))
