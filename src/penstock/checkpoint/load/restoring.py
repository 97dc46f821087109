"""What of a checkpoint is for the stages and the optimizer that this process has now; the reverse of `named_tensors`.

Everything is compared before anything is written: names, shapes, types, parameter groups. What does not fit is listed,
all of it at once, and the model is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.checkpoint.load.optimizer_state import state_faults, state_of
from penstock.checkpoint.load.reading import CheckpointContents
from penstock.checkpoint.named_tensors import (
    AVERAGE,
    Optimizers,
    class_of,
    model_entries,
    name_of,
    names_by_parameter,
    section_of,
)
from penstock.errors import CheckpointError
from penstock.reading import check_like
from penstock.runtime.messages.plain import TENSOR, decode, same

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline


def fit_model(
    pipe: Pipeline,
    contents: CheckpointContents,
    plain: Mapping[str, Any],
    replicas_alike: bool = True,
    leave_out: Callable[[str], bool] | None = None,
) -> dict[str, Tensor]:
    """Return the tensors to fill, by key; `plain` has the extra state that modules keep beside theirs.

    A parameter that is left out (by its name) may be missing, and then stays as it is.
    """
    tensors, path = contents.tensors, contents.path
    targets: dict[str, Tensor] = {}
    known, wrong = names_in(pipe, contents)
    has_loss = any(key.startswith("loss.") for key in tensors)
    for name, value in model_entries(pipe):
        section = section_of(pipe, name)
        if section == "loss" and not has_loss:
            # It was saved with a loss that has no state: this one stays as it was made.
            continue
        key = f"{section}.{known.get(name, name)}"
        if not isinstance(value, Tensor):
            if name not in plain:
                wrong.append(f"the extra state {name} is not in it")
            continue
        saved = tensors.get(key)
        if saved is None:
            if leave_out is None or not isinstance(value, nn.Parameter) or not leave_out(name):
                wrong.append(f"{name} is not in it")
        elif misfit := _misfit(name, saved, value, "in the model"):
            wrong.append(misfit)
        else:
            own = f"replica-{pipe.deployment.replication.index:05d}.{name}"
            targets[own if own in tensors and replicas_alike else key] = value.detach()
    everything = set(_all_names(pipe))
    all_saved = (key.removeprefix("model.") for key in tensors if key.startswith("model."))
    foreign = sorted(name for name in all_saved if name not in everything)
    if foreign:
        more = ", ..." if len(foreign) > 5 else ""
        wrong.insert(0, f"{len(foreign)} of its tensors are not in the model: {', '.join(foreign[:5])}{more}")
    if wrong:
        raise CheckpointError(_listed(f"{path} does not fit the model", wrong), path=path)
    return targets


def fit_averages(
    pipe: Pipeline, contents: CheckpointContents, averages: Mapping[str, Tensor]
) -> dict[str, tuple[str, Tensor]]:
    """Return the averages to fill that a checkpoint has, by parameter name: (key, tensor)."""
    known, _ = names_in(pipe, contents)
    found: dict[str, tuple[str, Tensor]] = {}
    wrong: list[str] = []
    for name, value in averages.items():
        saved = contents.tensors.get(key := f"{AVERAGE}{known.get(name, name)}")
        if saved is not None:
            found[name] = key, value.detach()
            wrong += filter(None, [_misfit(name, saved, value, "here")])
    if wrong:
        raise CheckpointError(_listed(f"{contents.path} does not fit the averages", wrong), path=contents.path)
    return found


def names_in(pipe: Pipeline, contents: CheckpointContents) -> tuple[dict[str, str], list[str]]:
    """Map tied parameters that were saved under another name to the one that they have here; and report what is wrong.

    Which of its names comes first can depend on the way of cutting: in a graph, on where the module that reads it went.
    """
    places: dict[str, list[str]] = {}
    for other, first in pipe.state.first_names().items():
        places.setdefault(first, [first]).append(other)
    names: dict[str, str] = {}
    wrong: list[str] = []
    for first, every in places.items():
        saved = [name for name in dict.fromkeys(every) if f"model.{name}" in contents.tensors]
        if len(saved) > 1:
            wrong.append(f"{' and '.join(saved)} are {len(saved)} tensors in it and one in the model")
        elif saved:
            names[first] = saved[0]
    return names, wrong


def _all_names(pipe: Pipeline) -> Iterable[str]:
    others = pipe.state.first_names()
    for holding in pipe.deployment.staged.holdings():
        for full in holding.names.values():
            yield full
            yield others.get(full, full)


class OptimizerFit:
    """What the optimizers here take from a checkpoint: `targets` are to be filled, then `finish` is called."""

    def __init__(
        self, pipe: Pipeline, optimizers: Optimizers, contents: CheckpointContents, plain: Mapping[str, Any] | None
    ) -> None:
        path = contents.path
        if plain is None:
            raise CheckpointError(
                f"{path} was saved without an optimizer; load it without optimizer=, or save with one", path=path
            )
        if plain["class"] != class_of(optimizers):
            raise CheckpointError(
                f"{path} has the state of {plain['class']}, and optimizer= is {class_of(optimizers)}; use the same "
                f"kind, or load without optimizer=",
                path=path,
            )
        self.targets: dict[str, Tensor] = {}
        self._optimizers = optimizers
        self._state = plain["state"]
        known, _ = names_in(pipe, contents)
        self._names = {number: known.get(name, name) for number, name in names_by_parameter(pipe).items()}
        self._nothing = pipe.state.nothing
        self._contents = contents
        self._saved = [(group, decode(group["options"], contents.tensor)) for group in plain["groups"]]
        self._by_name = {name: each for each in self._saved for name in each[0]["names"]}
        self._settings: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
        wrong: list[str] = []
        for optimizer in optimizers:
            for number, group in enumerate(optimizer.param_groups):
                wrong += self._fit(optimizer, number, group)
        if wrong:
            raise CheckpointError(_listed(f"{path} does not fit the optimizer", wrong), path=path)

    def _members(self, group: Mapping[str, Any], number: int = 0) -> list[tuple[str, Tensor]]:
        owned = [parameter for parameter in group["params"] if parameter is not self._nothing]
        return [(name_of(parameter, self._names, number), parameter) for parameter in owned]

    def _fit(self, optimizer: torch.optim.Optimizer, number: int, group: dict[str, Any]) -> list[str]:
        members = self._members(group, number)
        missing = [name for name, _ in members if name not in self._by_name]
        if missing:
            return [f"{name} was not in the optimizer that was saved" for name in missing]
        if members:
            found = [self._by_name[name] for name, _ in members]
        else:  # a group that has nothing here goes along with its namesakes elsewhere
            found = [each for each in self._saved if each[0]["number"] == number]
        if not found:
            return []
        wrong = [
            f"{name} and {members[0][0]} are both in parameter group {number}, and were saved with different options"
            for (name, _), each in zip(members, found, strict=False)
            if each is not found[0] and not same(each[1], found[0][1])
        ]
        saved, options = found[0]
        # Switches, such as which implementation, may be None as well as True or False.
        stated = {key: value for key, value in options.items() if value is not None or type(group.get(key)) is not bool}
        check_like(_without_tensors(stated), _without_tensors(group), self._contents.path, "options")
        self._settings.append((group, saved["options"]))
        due = state_of(optimizer, group, members[0][1]) if members else {}
        for name, parameter in members:
            faults = list(
                state_faults(name, self._state.get(name), due, tuple(parameter.shape), self._contents.tensors)
            )
            wrong += faults
            for entry in () if faults else self._state.get(name, {}).values():
                key = entry.get(TENSOR, "") if isinstance(entry, dict) else ""
                if key.startswith(f"optimizer.{name}."):
                    self.targets[key] = _room_for(key, self._contents.tensors[key], parameter, options)
        return wrong

    def finish(self, tensor: Callable[[str], Tensor]) -> None:
        for group, saved in self._settings:
            group.update(decode(saved, tensor))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for name, parameter in self._members(group):
                    optimizer.state.pop(parameter, None)
                    entries = self._state.get(name)
                    if entries:
                        state = {key: self._decoded(entry, parameter, tensor) for key, entry in entries.items()}
                        optimizer.state[parameter] = state

    def _decoded(self, entry: Any, parameter: Tensor, tensor: Callable[[str], Tensor]) -> Any:
        """Decode a value of optimizer state; tensors deeper inside it are put beside their parameter."""

        def beside(key: str) -> Tensor:
            return tensor(key) if key in self.targets else tensor(key).to(parameter.device)

        return decode(entry, beside)


def _without_tensors(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if not isinstance(value, Tensor)}


def _room_for(key: str, saved: Mapping[str, Any], parameter: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Make room for optimizer state: beside its parameter and sharded alike; a count of steps mostly on the CPU."""
    dtype = getattr(torch, saved["dtype"])
    shape = tuple(saved["shape"])
    if shape == tuple(parameter.shape) and isinstance(parameter, DTensor):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if not shape and key.endswith(".step") and not (options.get("capturable") or options.get("fused")):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def _misfit(name: str, saved: Mapping[str, Any], value: Tensor, where: str) -> str:
    """Describe what differs between a tensor in a checkpoint and one that is to be filled; empty where nothing does."""
    if tuple(saved["shape"]) != tuple(value.shape):
        return f"{name} has shape {tuple(saved['shape'])} in it and {tuple(value.shape)} {where}"
    dtype = str(value.dtype).removeprefix("torch.")
    return "" if saved["dtype"] == dtype else f"{name} is {saved['dtype']} in it and {dtype} {where}"


def _listed(title: str, lines: list[str], most: int = 20) -> str:
    more = [f"... and {len(lines) - most} more"] if len(lines) > most else []
    return "\n  ".join([f"{title}:", *lines[:most], *more])
