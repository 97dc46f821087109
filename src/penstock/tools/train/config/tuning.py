"""Whether the keys about the optimizer, averages, early stopping and logging go together."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import is_function

ADAM, SGD = ("lr", "weight_decay", "betas", "eps"), ("lr", "weight_decay", "momentum")


def tuning_faults(config: TrainConfig) -> Iterator[str]:
    """Describe each fault in these keys together."""
    yield from _optimizer(config)
    for pattern, options in config.optimizer.groups.items():
        yield from _group(f'optimizer.groups."{pattern}"', options, config.optimizer.name)
    if config.training.ema == 1:
        yield "training.ema is 1, with which the average would never change; give a decay below 1, such as 0.999"
    if config.evaluation.patience is not None and not config.evaluation.every:
        yield "evaluation.patience counts evaluations, and evaluation.every is 0: none; set the steps between them"
    callback = config.logging.callback
    if callback is not None and not is_function(callback):
        yield f'logging.callback is "{callback}"; a function is written "module:function", such as "my_run:seen"'
    if config.logging.wandb == "off" and config.logging.wandb_options:
        yield 'logging.wandb_options are given, but logging.wandb is "off"; set it to "online" or "offline"'


def _optimizer(config: TrainConfig) -> Iterator[str]:
    options = config.optimizer
    if not _are_betas(options.betas):
        yield f"optimizer.betas is {options.betas}; it takes two numbers from 0 to below 1, such as [0.9, 0.95]"
    if options.momentum and options.name != "sgd":
        yield f"optimizer.momentum is for sgd; {options.name} has optimizer.betas"
    if options.name == "adamw8bit":
        if options.implementation != "default":
            yield (
                f"optimizer.implementation={options.implementation} is for torch's optimizers; adamw8bit has one "
                f"implementation, the default"
            )
        if config.mesh.replicas > 1 and config.mesh.replicate == "fsdp":
            yield 'optimizer.name=adamw8bit does not know sharded parameters; choose mesh.replicate="ddp", or "adamw"'


def _are_betas(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(_is_number(beta) and beta < 1 for beta in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _group(path: str, options: Any, name: str) -> Iterator[str]:
    known = SGD if name == "sgd" else ADAM
    if not isinstance(options, Mapping) or not options:
        yield f"{path} is {options!r}; it takes a table of options, such as {{lr = 1e-4}}"
        return
    for option, value in options.items():
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            yield f"{path} has {option}; {hint}{name} has {', '.join(known)}"
        elif option == "betas":
            if not _are_betas(value):
                yield f"{path}.betas is {value}; it takes two numbers from 0 to below 1, such as [0.9, 0.95]"
        elif not _is_number(value):
            yield f"{path}.{option} is {value!r}; it takes a finite number, 0 or more"
