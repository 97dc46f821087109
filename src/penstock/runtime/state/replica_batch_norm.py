"""Batch norm over the batches of data-parallel replicas, on any device.

Every replica of a stage calls it with its own batch; sums go through one collective each way. The gradient is that of
the sum of all replicas' losses, as of any data-parallel training that then averages gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.devices import widest


class ReplicaGroup:
    """A process group as an attribute of a layer: copies of the layer share it, and it cannot be written to a file."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, _: Any) -> ReplicaGroup:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a batch norm with a process group cannot be pickled; call penstock.restore_batch_norm first")


class _SumOverReplicas(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = values.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _sum(values: Tensor, group: Any) -> Tensor:
    total: Tensor = _SumOverReplicas.apply(values, group)  # type: ignore[no-untyped-call]
    return total


def over_replicas(layer: _BatchNorm, x: Tensor, group: Any) -> Tensor:
    """`layer(x)`, normalised by the statistics of all replicas' inputs; updates its running statistics with them."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    wide = x if x.dtype is torch.float64 else x.float()
    count = _sum(torch.tensor([x.numel() / x.shape[1]], dtype=widest(x.device.type), device=x.device), group)
    total = count.item()
    mean = _sum(wide.sum(axes), group) / total
    apart = wide - mean.view(shape)
    variance = _sum((apart * apart).sum(axes), group) / total
    y = (apart * torch.rsqrt(variance + layer.eps).view(shape)).to(x.dtype)
    if layer.weight is not None:
        y = y * layer.weight.view(shape)
    if layer.bias is not None:
        y = y + layer.bias.view(shape)
    if layer.training and layer.track_running_stats and layer.running_mean is not None:
        track(layer, mean.detach(), variance.detach() * (total / (total - 1)))
    return y


def track(layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Take the statistics of one batch into a layer's running ones, as the layer itself would."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    factor = 0.0 if layer.momentum is None else layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:  # the mean of all batches
            factor = 1.0 / float(layer.num_batches_tracked)
    with torch.no_grad():
        for running, value in ((layer.running_mean, mean), (layer.running_var, variance)):
            running.copy_((1 - factor) * running + factor * value.to(running.dtype))
