"""The learning rate over time: a share of each group's own rate, as torch's own scheduler.

        ______________             _                    _
wsd    /              \\    cosine / `-.        linear  / `.
      /                \\_        /     `._            /    `.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from penstock.tools.train.config.settings import TrainConfig


def build_rate(config: TrainConfig, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Build the learning rate over time, as torch's own scheduler."""
    return LambdaLR(optimizer, lambda step: rate_at(config, step))


def follow_config(config: TrainConfig, optimizer: torch.optim.Optimizer, rate: LambdaLR, options: list[Any]) -> None:
    """Set options after a load to what the configuration says now, `options` of each group, not to what was saved.

    Where nothing was changed, these are the same numbers.
    """
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
        group["lr"] = group["initial_lr"] * rate_at(config, rate.last_epoch)
    rate.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    rate._last_lr = [group["lr"] for group in optimizer.param_groups]


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what each group was given, without its parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def rate_at(config: TrainConfig, step: int) -> float:
    """Return the share of a learning rate in a step, counted from 0: up in `warmup` steps, then down to `final`."""
    options, steps = config.optimizer, config.training.steps
    if step < options.warmup:
        return (step + 1) / options.warmup
    if options.decay == "constant":
        return 1.0
    begin = options.warmup
    if options.decay == "wsd":  # the rate is held until the share of steps in which it falls
        begin = max(begin, steps - 1 - round(options.decay_share * steps))
    way = min(1.0, max(0, step - begin) / max(1, steps - 1 - begin))
    fallen = (1 - math.cos(math.pi * way)) / 2 if options.decay == "cosine" else way
    return 1.0 - (1.0 - options.final) * fallen
