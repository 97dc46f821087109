"""What a `Pipeline` is given, looked at before anything is built.

A slip shows here by its own name and value. Further down it would be a TypeError in code that the user has not written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import ModelError, UsageError
from penstock.model.wrapped import refuse_compiled_model, refuse_wrapped_model
from penstock.optim.precision import precision_of
from penstock.pipeline.call_arguments import check_loss_fn
from penstock.runtime.batch.lengths import ByTokens
from penstock.runtime.loss.weights import torch_reduction
from penstock.runtime.state.batch_norm import BATCH_NORMS
from penstock.schedule import Op, Schedule

__all__ = ["check_arguments", "op_of", "token_split"]

PROVISIONAL = 8  # microbatches, until a first batch says how many it takes

CHOICES = {
    "recompute": ("never", "except_last", "always"),
    "loss_reduction": (None, "mean", "sum"),
    "loss_per_microbatch": (False, True),
    "inputs": ("every", "first"),
    "batch_norm": BATCH_NORMS,
    "replicate": (None, "ddp", "fsdp"),
    "atomic": (False, True),
}


def check_arguments(model: Any, given: Mapping[str, Any]) -> None:
    """Raise for the first of the arguments, by name, that cannot work."""
    for name, choices in CHOICES.items():
        if given[name] not in choices:
            raise UsageError(f"{name}={given[name]!r}: choose one of {', '.join(map(repr, choices))}")
    precision_of(given["precision"])
    for name, (fits, would_work) in RULES.items():
        if given[name] is not None and not fits(given[name]):
            raise UsageError(f"{name}={_shown(given[name])}: {would_work}")
    check_gpus(given["devices"])
    if given["schedule"] is None or given["timeout"] is None:
        name = "schedule" if given["schedule"] is None else "timeout"
        raise UsageError(f"{name}=None: {RULES[name][1]}; or leave it out")
    if given["loss_weight"] is not None and given["loss_reduction"] == "sum":
        raise UsageError(
            "loss_weight= weighs the terms of a mean; with loss_reduction='sum' all count alike: leave it out"
        )
    if given["loss_fn"] is not None:
        check_loss_fn(given["loss_fn"])
    _check_reduction(given)
    refuse_wrapped_model(model)
    refuse_compiled_model(model)
    if not isinstance(model, (nn.Module, Sequence)) or isinstance(model, str):
        raise UsageError(f"model={model!r}: pass an nn.Module, or a list of stage modules")
    layers = model if isinstance(model, (nn.Sequential, nn.ModuleList, Sequence)) else None
    if layers is not None and not len(layers):
        raise ModelError(f"the model is an empty {type(model).__name__}; there is nothing to cut into stages")
    cut_already = layers is not None and not isinstance(model, nn.Sequential)
    counted = isinstance(given["balance"], Sequence) and not isinstance(given["balance"], str)
    if counted and given["split_at"]:
        raise UsageError("balance=[counts] and split_at= both say where to cut; leave one of them out")
    if given["speeds"] is not None and (cut_already or counted):
        why = "balance=[counts] says" if counted else "a list of stage modules says"
        raise UsageError(f"speeds= helps to find a cut, but {why} already where to cut; leave one of them out")


def check_gpus(devices: Sequence[Any] | None) -> None:
    """Devices that torch does not see here are an error of the call."""
    named = [str(device) for device in devices or () if torch.device(device).type == "cuda"]
    if named and not torch.cuda.is_available():
        raise UsageError(f"devices has {named[0]}, but torch sees no GPU here; leave devices= out to run on the CPU")


def _check_reduction(given: Mapping[str, Any]) -> None:
    """What one of torch's losses says of itself must be what the pipeline is told."""
    said, wanted = torch_reduction(given["loss_fn"], {}), given["loss_reduction"]
    if said == "none":
        raise UsageError("loss_fn has reduction='none', but must return one number: pass reduction='mean' or 'sum'")
    differ = said is not None and wanted is not None and (said == "sum") != (wanted == "sum")
    if differ and not given["loss_per_microbatch"]:
        raise UsageError(
            f"loss_reduction={wanted!r}, but loss_fn has reduction={said!r}; leave loss_reduction= out, or pass "
            f"loss_per_microbatch=True if the batch's loss shall be the {wanted} of its microbatches' losses"
        )
    if said == "sum" and given["loss_weight"] is not None:
        raise UsageError("loss_weight= weighs the terms of a mean, but loss_fn has reduction='sum': leave it out")


def _shown(value: Any) -> str:
    return f"a {type(value).__name__} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def op_of(op: Any) -> Op:
    """An op, also by its name or number."""
    try:
        return Op[op] if isinstance(op, str) else Op(op)
    except (KeyError, ValueError):
        raise UsageError(f"op={op!r}: choose one of {', '.join(f'Op.{each.name}' for each in Op)}") from None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_timeout(value: Any) -> bool:
    return _is_number(value) and value > 0 and not math.isnan(value)


def _are_dims(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        (isinstance(label, str) or _is_count(label)) and _is_dim(dim) for label, dim in value.items()
    )


def _is_dim(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_dim, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_dim, value))
    return value is None or _is_count(value)


def _are_skips(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(map(_is_count, pair)) for pair in value
    )


def _are_devices(value: Any) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    try:
        return all(torch.device(device) is not None for device in value)
    except (RuntimeError, TypeError):
        return False


def _is_example(value: Any) -> bool:
    return isinstance(value, (tuple, list)) or (
        isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


def _is_balance(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_number(weight) for name, weight in value.items())
    return isinstance(value, str) or (isinstance(value, Sequence) and all(map(_is_count, value)))


Rule = tuple[Callable[[Any], bool], str]  # whether a value fits, and what would work
_COUNT: Rule = (_is_count, "pass a whole number")
_FUNCTION: Rule = (callable, "pass a function")
RULES: dict[str, Rule] = {
    "microbatches": _COUNT,
    "stages": (lambda value: _is_count(value) and value >= 1, "pass a whole number, at least 1"),
    "example": (_is_example, "pass the model's inputs as a tuple, such as (x,), or a dict of keyword arguments"),
    "split_at": (_are_names, "pass a list of the modules' names, such as ['layers.4', 'layers.8']"),
    "balance": (_is_balance, "pass 'parameters', 'time', 'memory', whole numbers such as [3, 3, 2], or {name: weight}"),
    "ranks": _COUNT,
    "seed": _COUNT,
    "keep_model": (lambda value: isinstance(value, bool), "pass True or False"),
    "schedule": (
        lambda value: isinstance(value, (str, Schedule)),
        "pass a name such as '1f1b', the path of a .csv or .json file, or a Schedule",
    ),
    "timeout": (_is_timeout, "timeout is in seconds and above 0, such as 60.0"),
    "loss_fn": (callable, "pass a function of (output, target) that returns the loss, such as F.mse_loss"),
    "loss_weight": (
        callable,
        "pass a function that returns a number, of the target or of anything that step() is passed, by name",
    ),
    "init": (callable, "pass a function of (name, tensor) that fills the tensor"),
    "batch_dims": (_are_dims, "pass a dict of names or positions to a dimension or None, such as {'mask': 1}"),
    "batch_norm_group": (lambda value: isinstance(value, dist.ProcessGroup), "pass a process group of replicas"),
    "group": (lambda value: isinstance(value, dist.ProcessGroup), "pass a process group of torch.distributed"),
    "mesh": (
        lambda value: hasattr(value, "mesh_dim_names") and hasattr(value, "get_group"),
        "pass a DeviceMesh with an axis named 'pp'",
    ),
    "window": (
        lambda value: _is_count(value) and value >= 1,
        "pass how many stages of a rank are whole at a time, at least 1",
    ),
    "shard_precision": (
        lambda value: type(value).__name__ == "MixedPrecisionPolicy",  # importing it takes a second
        "pass a torch.distributed.fsdp.MixedPrecisionPolicy",
    ),
    "skips": (_are_skips, "pass pairs of stages, such as [(0, 3)]"),
    "devices": (_are_devices, "pass one device for each rank, such as ['cuda:0', 'cuda:1']"),
    "speeds": (
        lambda value: isinstance(value, (list, tuple)) and all(map(_is_number, value)),
        "pass one number for each rank, such as [1.0, 0.5]",
    ),
}


def token_split(
    split: str | ByTokens, microbatches: int | None, schedule: str | Schedule, replicated: bool
) -> tuple[str, ByTokens | None, int | None]:
    """How the model is cut, how batches are split by their tokens if they are, and how many microbatches at first."""
    if not isinstance(split, ByTokens):
        return split, None, microbatches
    fixed = isinstance(schedule, Schedule) or schedule.lower().endswith((".csv", ".json"))
    if split.max_tokens is not None and (fixed or replicated):
        why = "a schedule from a value or file has its number" if fixed else "replicas must have one number"
        raise UsageError(
            f"by_tokens({split.max_tokens}) makes as many microbatches as a batch needs, but {why}; "
            f"leave max_tokens out, or name the schedule"
        )
    return "auto", split, microbatches or (None if fixed or split.max_tokens is None else PROVISIONAL)
