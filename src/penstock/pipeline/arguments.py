"""What a `Pipeline`, and a call of it, is given: looked at before anything is built or runs.

It catches mistakes that would otherwise surface as a TypeError inside the user's own code.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import ModelError, UsageError
from penstock.model.cut_options import CutOptions
from penstock.model.original.wrappers import refuse_compiled_model, refuse_wrapped_model
from penstock.parallel.parallel_options import ParallelOptions
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
    """Return the arguments, with those that a plan states; none of them may be stated twice."""
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
    if loss_fn is not None:
        check_rules({"loss_fn": loss_fn}, {"loss_fn": RULES["loss_fn"]})
        check_loss_fn(loss_fn)
    _check_reduction(loss_fn, options)


def _check_reduction(loss_fn: Any, options: LossOptions) -> None:
    """Check that what one of torch's losses says of itself is what the pipeline is told."""
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
    """Return how many microbatches the first schedule has, where a batch's lengths may ask for another number later."""
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
    """Return what all ranks must have been given alike, in words."""
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


def positional(function: Callable[..., Any] | None) -> list[str]:
    """Return the names of the places that arguments fill, in order; none where the function does not say."""
    signature = _signature(function)
    parameters = [] if signature is None else list(signature.parameters.values())
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return None


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def check_loss_fn(loss_fn: Any) -> None:
    """Check that a loss function can be called with an output and a target."""
    if isinstance(loss_fn, type):
        raise UsageError(f"loss_fn is the class {loss_fn.__qualname__}; pass an instance: loss_fn={_name(loss_fn)}()")
    signature = _signature(loss_fn)
    if signature is None:
        return
    try:
        signature.bind_partial(None, None)
    except TypeError as error:
        raise UsageError(
            f"loss_fn is called as loss_fn(output, target, **loss_kwargs), but {_name(loss_fn)}{signature} cannot be "
            f"({error}); take both, even if the target is not used: lambda output, target: ..."
        ) from None


def check_loss_kwargs(loss_fn: Any, names: Sequence[str]) -> None:
    """Check that a loss function gets all that it needs beside output and target, and nothing that it does not know."""
    signature = _signature(loss_fn)
    if signature is None:
        return
    try:
        signature.bind(None, None, **dict.fromkeys(names))
    except TypeError as error:
        raise UsageError(
            f"loss_fn {_name(loss_fn)}{signature} is called with output, target and loss_kwargs="
            f"{{{', '.join(map(repr, names))}}}: {error}; pass what it needs by name in loss_kwargs={{...}}"
        ) from None


def check_reduce(reduce: Any, names: Sequence[str]) -> None:
    """Check that a function for `predict(reduce=)` can be called with an output and what was passed for it."""
    if not callable(reduce):
        raise UsageError(f"reduce={reduce!r}: pass a function of (output, **reduce_kwargs)")
    signature = _signature(reduce)
    try:
        if signature is not None:
            signature.bind(None, **dict.fromkeys(names))
    except TypeError as error:
        raise UsageError(
            f"reduce {_name(reduce)}{signature} is called with an output and reduce_kwargs="
            f"{{{', '.join(map(repr, names))}}}: {error}"
        ) from None


def check_call(call: str, forward: Callable[..., Any], args: Sequence[Any], target: Any, loss_fn: Any) -> None:
    """Check positional arguments, which are the model's inputs; one of torch's losses, where it is called, has a
    target.
    """
    signature = _signature(forward)
    parameters = [] if signature is None else list(signature.parameters.values())
    places = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    takes_any = signature is None or any(each.kind is each.VAR_POSITIONAL for each in parameters)
    if len(args) == 1 and isinstance(args[0], Mapping) and places and places[0] in args[0]:
        raise UsageError(
            f"{call} was passed a dict with {places[0]!r} in it, which the model takes by that name; pass its items: "
            f"{call[:-1]}**batch)"
        )
    if len(args) > len(places) and not takes_any:
        remedy = "" if target is not None else f"; the target goes by name: {call[:-1]}x, target=y)"
        raise UsageError(
            f"{call} was passed {len(args)} positional arguments, but the model takes {len(places)} "
            f"({', '.join(places) or 'none'}){remedy}"
        )
    if target is None and torch_reduction(loss_fn, {}) is not None:
        raise UsageError(f"{call} was passed no target, but loss_fn {_name(loss_fn)} needs one: pass target=")
