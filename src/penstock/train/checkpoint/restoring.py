"""The other way: what a checkpoint has, for the stages and the optimizer that this process has now.

Everything is compared before anything is written: names, shapes, types, parameter groups. What does not fit is listed,
all of it at once, and the model is left as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.errors import CheckpointError
from penstock.train.checkpoint.state import Optimizers, class_of, model_entries, name_of, names_by_parameter, own_names
from penstock.train.checkpoint.values import TENSOR, decode

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

__all__ = ["take_model", "take_optimizers"]


def take_model(pipe: Pipeline, tensors: Mapping[str, Any], plain: Mapping[str, Any], path: Any) -> dict[str, Tensor]:
    """The tensors to fill, by key; everything that does not fit is an error, before anything is written."""
    targets: dict[str, Tensor] = {}
    wrong: list[str] = []
    for name, value in model_entries(pipe):
        key = f"model.{name}"
        if not isinstance(value, Tensor):
            if name not in plain:
                wrong.append(f"the extra state {name} is not in it")
            continue
        saved = tensors.get(key)
        if saved is None:
            wrong.append(f"{name} is not in it")
        elif tuple(saved["shape"]) != tuple(value.shape):
            wrong.append(f"{name} has shape {tuple(saved['shape'])} in it and {tuple(value.shape)} in the model")
        elif saved["dtype"] != _dtype_name(value):
            wrong.append(f"{name} is {saved['dtype']} in it and {_dtype_name(value)} in the model")
        else:
            targets[key] = value.detach()
    known = set(_all_names(pipe))
    foreign = sorted(key for key in tensors if key.startswith("model.") and key.removeprefix("model.") not in known)
    wrong += [f"{key.removeprefix('model.')} is in it and not in the model" for key in foreign]
    if wrong:
        raise CheckpointError(_listed(f"{path} does not fit the model", wrong), path=path)
    return targets


def _all_names(pipe: Pipeline) -> Iterable[str]:
    others = own_names(pipe)
    for part in pipe.split.parts:
        for full in part.names.values():
            yield full
            yield others.get(full, full)


def take_optimizers(
    pipe: Pipeline, optimizers: Optimizers, tensors: Mapping[str, Any], plain: Mapping[str, Any] | None, path: Any
) -> tuple[dict[str, Tensor], Any]:
    """The tensors to fill, and `finish(tensor)`, which puts all of it into the optimizers."""
    if plain is None:
        raise CheckpointError(
            f"{path} was saved without an optimizer; load it without optimizer=, or save with one", path=path
        )
    if plain["class"] != class_of(optimizers):
        raise CheckpointError(
            f"{path} has the state of {plain['class']}, and optimizer= is {class_of(optimizers)}; use the same kind, "
            f"or load without optimizer=",
            path=path,
        )
    names = names_by_parameter(pipe)
    options = {name: group["options"] for group in plain["groups"] for name in group["names"]}
    targets: dict[str, Tensor] = {}
    wrong: list[str] = []
    settings: list[tuple[dict[str, Any], Any]] = []
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            members = [name_of(parameter, names, number) for parameter in group["params"]]
            missing = [name for name in members if name not in options]
            wrong += [f"{name} was not in the optimizer that was saved" for name in missing]
            if missing or not members:
                continue
            for name in members:
                if options[name] != options[members[0]]:
                    wrong.append(
                        f"{name} and {members[0]} are in parameter group {number}, but were saved with other options"
                    )
            settings.append((group, options[members[0]]))
            for name, parameter in zip(members, group["params"], strict=True):
                for entry in plain["state"].get(name, {}).values():
                    if isinstance(entry, dict) and entry.get(TENSOR, "").startswith(f"optimizer.{name}."):
                        key = entry[TENSOR]
                        targets[key] = _room_for(key, tensors[key], parameter, group)
    if wrong:
        raise CheckpointError(_listed(f"{path} does not fit the optimizer", wrong), path=path)

    def finish(tensor: Any) -> None:
        for group, saved in settings:
            group.update(decode(saved, tensor))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    entries = plain["state"].get(names[id(parameter)], {})
                    optimizer.state.pop(parameter, None)
                    if entries:
                        optimizer.state[parameter] = {key: decode(entry, tensor) for key, entry in entries.items()}

    return targets, finish


def _room_for(key: str, saved: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Where a tensor of optimizer state goes: beside its parameter, sharded as that is; a count of steps stays where
    the optimizer looks for it."""
    dtype = getattr(torch, saved["dtype"])
    shape = tuple(saved["shape"])
    if shape == tuple(parameter.shape) and isinstance(parameter, DTensor):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if not shape and key.endswith(".step") and not (group.get("capturable") or group.get("fused")):
        return torch.empty(shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _listed(title: str, lines: list[str], most: int = 20) -> str:
    more = [f"... and {len(lines) - most} more"] if len(lines) > most else []
    return "\n  ".join([f"{title}:", *lines[:most], *more])
