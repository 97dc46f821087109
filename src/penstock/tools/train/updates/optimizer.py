"""The optimizer of a run: options for each parameter by its name, and the learning rate over time.

What a parameter's options are depends on the whole model's names and shapes alone, never on the cut: so every rank has
the same groups, and a checkpoint can be loaded into another layout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from penstock.errors import UsageError
from penstock.pipeline import Pipeline
from penstock.runtime.optim.groups import unmatched
from penstock.tools.train.config.settings import TrainConfig

Options = dict[str, Any]
NUMBERED = re.compile(r"(\D*)(\d+)")
IMPLEMENTATIONS: dict[str, Options] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "loop": {"foreach": False},
}


def build_optimizer(config: TrainConfig, pipe: Pipeline) -> torch.optim.Optimizer:
    """Build the optimizer over the parameters that this process owns, with the options of each by its name."""
    options = config.optimizer
    groups = pipe.parameter_groups(_rules(options_by_name(config, pipe)))
    common: Options = {"lr": options.lr, "weight_decay": options.weight_decay}
    if options.name != "sgd":
        common |= {"betas": (options.betas[0], options.betas[1]), "eps": options.eps}
    if options.name == "adamw8bit":
        made: torch.optim.Optimizer = _adamw8bit()(groups, **common)
        return made
    common |= IMPLEMENTATIONS[options.implementation]
    if options.name == "sgd":
        return torch.optim.SGD(groups, momentum=options.momentum, **common)
    return (torch.optim.AdamW if options.name == "adamw" else torch.optim.Adam)(groups, **common)


def _adamw8bit() -> Callable[..., Any]:
    try:
        from bitsandbytes.optim import AdamW8bit  # optional, and slow to load
    except ImportError as error:
        raise UsageError(
            f'optimizer.name is "adamw8bit", which needs bitsandbytes, and that cannot be loaded ({error}): '
            f'pip install bitsandbytes, or choose "adamw"'
        ) from None
    found: Callable[..., Any] = AdamW8bit
    return found


def options_by_name(config: TrainConfig, pipe: Pipeline) -> dict[str, Options]:
    """Return for each parameter of the whole model the options that differ from the optimizer's own."""
    options = config.optimizer
    every = pipe.state.every_parameter()
    for pattern in options.groups:
        if not any(fnmatchcase(name, pattern) for name in every):
            raise UsageError(f"optimizer.groups: {unmatched(pattern, list(every), pipe.state.first_names())}")
    shares: dict[str, float] = {}
    if options.layer_decay is not None:
        shares = layer_shares(model_names(pipe), options.layer_decay)
    found: dict[str, Options] = {}
    for name, parameter in every.items():
        own: Options = {"weight_decay": 0.0} if parameter.dim() < 2 else {}
        if shares.get(name, 1.0) != 1.0:
            own["lr"] = options.lr * shares[name]
        own |= next((wanted for pattern, wanted in options.groups.items() if fnmatchcase(name, pattern)), {})
        if "betas" in own:
            own["betas"] = tuple(own["betas"])
        found[name] = own
    return found


def _rules(options: dict[str, Options]) -> dict[Any, Options]:
    """Make one rule for all parameters with the same options; those without any are left to the last group."""
    members: dict[str, set[str]] = {}
    values: dict[str, Options] = {}
    for name, own in options.items():
        label = ", ".join(f"{key}={own[key]}" for key in sorted(own))
        if label:
            members.setdefault(label, set()).add(name)
            values[label] = own
    return {_Members(label, members[label]): values[label] for label in sorted(members)}


class _Members:
    """A rule that matches by a set of names; the group is called by the options that these have in common."""

    def __init__(self, label: str, names: set[str]) -> None:
        self.__name__, self._names = label, names

    def __call__(self, name: str, parameter: Tensor) -> bool:
        return name in self._names


# -- learning rates by layer


def model_names(pipe: Pipeline) -> list[str]:
    """Return the names of all parameters in the order of the model itself, whatever the cut."""
    model = pipe.deployment.staged.model
    parts: Iterable[nn.Module] = [model] if isinstance(model, nn.Module) else model
    return [name for part in parts for name, _ in part.named_parameters(remove_duplicate=False)]


def layer_shares(names: Sequence[str], decay: float) -> dict[str, float]:
    """Return each parameter's share of the learning rate: `decay` to the power of the layers above its own.

    The layers are the longest numbered list of modules (`model.layers.0`, `model.layers.1`, ... or `block0`, ...). All
    that comes before it in the model is one layer below them, and all that comes after it is one layer above.
    """
    lists: dict[str, set[int]] = {}
    places = {name: _place(name) for name in names}
    for owner, number in filter(None, places.values()):
        lists.setdefault(owner, set()).add(number)
    longest = max(lists, key=lambda each: len(lists[each]), default="")
    if len(lists.get(longest, ())) < 2:
        shown = ", ".join(names[:5])
        raise UsageError(
            f"optimizer.layer_decay: the model has no numbered list of layers, such as layers.0 and layers.1, among "
            f"its {len(names)} parameters ({shown}{', ...' if len(names) > 5 else ''}); give rates by optimizer.groups"
        )
    order = {number: place for place, number in enumerate(sorted(lists[longest]), start=1)}
    top = len(order) + 1
    depths: dict[str, int] = {}
    depth = 0  # What comes before the list has this depth.
    for name in names:
        place = places[name]
        if place and place[0] == longest:
            depths[name], depth = order[place[1]], top
        else:
            depths[name] = depth
    return {name: decay ** (top - depths[name]) for name in names}


def _place(name: str) -> tuple[str, int] | None:
    """Find a parameter's list and number there by the first number in its name: `model.layers.`, 3."""
    parts = name.split(".")
    for depth, part in enumerate(parts):
        match = NUMBERED.fullmatch(part)
        if match:
            return ".".join([*parts[:depth], match[1]]), int(match[2])
    return None


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
