"""What a `Pipeline` is given, looked at before anything is built."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import ModelError, UsageError
from penstock.model.cut_options import CutOptions
from penstock.model.original.wrappers import refuse_compiled_model, refuse_wrapped_model
from penstock.parallel.parallel_options import ParallelOptions
from penstock.pipeline.call_arguments import check_loss_fn
from penstock.pipeline.devices import AUTO, check_devices
from penstock.rules import ArgumentRule, check_rules, choice, is_count, is_number
from penstock.runtime.batch.batch_options import BatchOptions
from penstock.runtime.batch.lengths import ByTokens
from penstock.runtime.loss.loss_options import LossOptions
from penstock.runtime.loss.losses import torch_reduction
from penstock.runtime.optim.precision import precision_of
from penstock.schedule import Op, Schedule

PROVISIONAL = 8  # microbatches, until a first batch says how many it takes


def check_arguments(model: Any, given: Mapping[str, Any]) -> None:
    """Raise for the first of the arguments, by name, that cannot work."""
    precision_of(given["precision"])
    check_rules(given, RULES)
    check_devices(given["devices"])
    check_loss(given["loss_fn"], given["loss_options"])
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
    if given["cut_options"].speeds is not None and (cut_already or counted):
        why = "balance=[counts] says" if counted else "a list of stage modules says"
        raise UsageError(
            f"CutOptions(speeds=) helps to find a cut, but {why} already where to cut; leave one of them out"
        )


def with_plan(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with those that a plan states; None of them may be stated twice."""
    plan = given.pop("plan")
    if plan is None:
        return given
    if not hasattr(plan, "pipeline_arguments"):
        raise UsageError(f"plan={type(plan).__name__}: pass a plan of penstock.plan(), such as plans.best")
    planned, layout = plan.pipeline_arguments(), plan.layout
    axes = [name for name in ("dp", "tp") if layout.size(name) > 1]
    if axes and given["mesh"] is None:
        raise UsageError(
            f"the plan is for {layout}, and without mesh= there is one pipeline of {layout.pp} ranks; pass mesh=, a "
            f"DeviceMesh with the axes {', '.join(['pp', *axes])}, or a plan for a cluster of {layout.pp} devices"
        )
    unset = {"stages": None, "microbatches": None, "schedule": "1f1b", "recompute": "never", "balance": None}
    twice = [name for name, value in {**unset, "split_at": ()}.items() if given[name] != value]
    if twice:
        raise UsageError(f"plan= says what {', '.join(f'{name}=' for name in twice)} would; leave out one or the other")
    return {**given, **planned}


def check_loss(loss_fn: Any, options: LossOptions) -> None:
    """Raise if this cannot be the loss of a pipeline."""
    if loss_fn is not None:
        check_rules({"loss_fn": loss_fn}, {"loss_fn": RULES["loss_fn"]})
        check_loss_fn(loss_fn)
    _check_reduction(loss_fn, options)


def _check_reduction(loss_fn: Any, options: LossOptions) -> None:
    """What one of torch's losses says of itself must be what the pipeline is told."""
    said, wanted = torch_reduction(loss_fn, {}), options.reduction
    if said == "none":
        raise UsageError("loss_fn has reduction='none', but must return one number: pass reduction='mean' or 'sum'")
    differ = said is not None and wanted is not None and (said == "sum") != (wanted == "sum")
    if differ and not options.per_microbatch:
        raise UsageError(
            f"LossOptions(reduction={wanted!r}), but loss_fn has reduction={said!r}; leave it out of LossOptions, or "
            f"pass per_microbatch=True if the batch's loss shall be the {wanted} of its microbatches' losses"
        )
    if said == "sum" and options.weight is not None:
        raise UsageError(
            "LossOptions(weight=) weighs the terms of a mean, but loss_fn has reduction='sum': leave it out"
        )


def op_of(op: Any) -> Op:
    """An op, also by its name or number."""
    try:
        return Op[op] if isinstance(op, str) else Op(op)
    except (KeyError, ValueError):
        raise UsageError(f"op={op!r}: choose one of {', '.join(f'Op.{each.name}' for each in Op)}") from None


def _is_timeout(value: Any) -> bool:
    return is_number(value) and value > 0 and not math.isnan(value)


def _are_devices(value: Any) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return value == AUTO
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
        return all(isinstance(name, str) and is_number(weight) for name, weight in value.items())
    return isinstance(value, str) or (isinstance(value, Sequence) and all(map(is_count, value)))


def _value_of(kind: type) -> ArgumentRule:
    name = f"penstock.{kind.__name__}"
    return ArgumentRule(lambda value: isinstance(value, kind), f"pass a {name}(...), or leave it out", or_none=False)


_COUNT = ArgumentRule(is_count, "pass a whole number")
RULES = {
    "recompute": choice("never", "except_last", "always"),
    "microbatches": _COUNT,
    "stages": ArgumentRule(lambda value: is_count(value) and value >= 1, "pass a whole number, at least 1"),
    "example": ArgumentRule(
        _is_example, "pass the model's inputs as a tuple, such as (x,), or a dict of keyword arguments"
    ),
    "split_at": ArgumentRule(_are_names, "pass a list of the modules' names, such as ['layers.4', 'layers.8']"),
    "balance": ArgumentRule(
        _is_balance, "pass 'parameters', 'time', 'memory', whole numbers such as [3, 3, 2], or {name: weight}"
    ),
    "ranks": _COUNT,
    "seed": _COUNT,
    "keep_model": ArgumentRule(lambda value: isinstance(value, bool), "pass True or False"),
    "schedule": ArgumentRule(
        lambda value: isinstance(value, (str, Schedule)),
        "pass a name such as '1f1b', the path of a .csv or .json file, or a Schedule; or leave it out",
        or_none=False,
    ),
    "timeout": ArgumentRule(
        _is_timeout, "timeout is in seconds and above 0, such as 60.0; or leave it out", or_none=False
    ),
    "loss_fn": ArgumentRule(callable, "pass a function of (output, target) that returns the loss, such as F.mse_loss"),
    "init": ArgumentRule(callable, "pass a function of (name, tensor) that fills the tensor"),
    "group": ArgumentRule(
        lambda value: isinstance(value, dist.ProcessGroup), "pass a process group of torch.distributed"
    ),
    "mesh": ArgumentRule(
        lambda value: hasattr(value, "mesh_dim_names") and hasattr(value, "get_group"),
        "pass a DeviceMesh with an axis named 'pp'",
    ),
    "devices": ArgumentRule(_are_devices, "pass 'auto', or one device for each rank, such as ['cuda:0', 'cuda:1']"),
    "loss_options": _value_of(LossOptions),
    "batch_options": _value_of(BatchOptions),
    "cut_options": _value_of(CutOptions),
    "parallel_options": _value_of(ParallelOptions),
}


def first_count(
    split: ByTokens | None, microbatches: int | None, schedule: str | Schedule, replicated: bool
) -> int | None:
    """How many microbatches the first schedule has, where a batch's lengths may ask for another number later."""
    if split is None:
        return microbatches
    fixed = isinstance(schedule, Schedule) or schedule.lower().endswith((".csv", ".json"))
    if split.max_tokens is not None and (fixed or replicated):
        why = "a schedule from a value or file has its number" if fixed else "replicas must have one number"
        raise UsageError(
            f"by_tokens({split.max_tokens}) makes as many microbatches as a batch needs, but {why}; "
            f"leave max_tokens out, or name the schedule"
        )
    return microbatches or (None if fixed or split.max_tokens is None else PROVISIONAL)


def alike(given: Mapping[str, Any]) -> dict[str, str]:
    """What all ranks must have been given alike, in words."""
    loss, batch = given["loss_options"], given["batch_options"]
    return {
        **{name: str(given[name]) for name in ("recompute", "timeout", "seed")},
        "loss reduction": str(loss.reduction),
        "loss per microbatch": str(loss.per_microbatch),
        "loss weight": "none" if loss.weight is None else "one",
        "split of batches": str(batch.split or "by rows"),
        "dims of batches": str(dict(batch.dims)),
        "order of microbatches": batch.order,
        "inputs": batch.inputs,
        "batch_norm": str(batch.batch_norm),
    }
