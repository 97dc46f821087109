"""The optimizer's state of all ranks as one, in the form that an optimizer of the whole model has, and back.

torch numbers parameters by their place in the groups of an optimizer. Each rank's optimizer has the same groups with
fewer members, so that its numbers are others. Names join the two: a group of the whole model has its members in one
order, whoever holds them. So a run can be resumed at any number of stages, or without any. The state of the model, as
its library has saved it, goes into the stages by the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.checkpoint.named_tensors import name_of, names_by_parameter
from penstock.errors import CheckpointError
from penstock.pipeline import Pipeline
from penstock.pipeline.model_state.carry import carry

CALL = "the state of the optimizer"


class OptimizerState:
    """The state of the optimizers of all ranks, by the names of parameters; made on every rank.

    `names` are those of all parameters of the model, in the order in which an optimizer without a pipeline has them.
    """

    def __init__(self, pipe: Pipeline, names: Iterable[str], optimizer: torch.optim.Optimizer) -> None:
        self._pipe, self._optimizer = pipe, optimizer
        own = names_by_parameter(pipe)
        self._members = [
            [(name_of(each, own, number), each) for each in group["params"] if each is not pipe.state.nothing]
            for number, group in enumerate(optimizer.param_groups)
        ]
        first = pipe.state.first_names()
        order: dict[str, int] = {}
        for name in names:
            order.setdefault(first.get(name, name), len(order))
        every = pipe.deployment.world.all_gather(CALL, [[name for name, _ in group] for group in self._members])
        groups = [{name for rank in every for name in rank[number]} for number in range(len(self._members))]
        self._groups = [sorted(group, key=order.__getitem__) for group in groups]
        self._options = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]

    def whole(self) -> dict[str, Any]:
        """Return, on rank 0, what `state_dict()` of an optimizer of the whole model would; called on every rank."""
        own = {
            f"{key}:{name}": value
            for group in self._members
            for name, parameter in group
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }
        sources: dict[str, int] = {}
        for rank, labels in enumerate(self._pipe.deployment.world.all_gather(CALL, list(own))):
            sources |= {label: rank for label in labels if label not in sources}
        found: dict[str, dict[str, Any]] = {}

        def give(label: str) -> Any:
            value = own[label]
            return self._pipe.deployment.replication.whole(value).detach().cpu() if isinstance(value, Tensor) else value

        def take(label: str, value: Any) -> None:
            key, _, name = label.partition(":")
            found.setdefault(name, {})[key] = value.clone() if isinstance(value, Tensor) else value

        items = [(label, source, [0]) for label, source in sources.items()]
        carry(self._pipe.deployment.world.transport, items, give, take)
        numbers = {name: number for number, name in enumerate(name for group in self._groups for name in group)}
        groups = [
            {**options, "params": [numbers[name] for name in group]}
            for options, group in zip(self._options, self._groups, strict=True)
        ]
        return {"state": {numbers[name]: values for name, values in found.items()}, "param_groups": groups}

    def load(self, whole: Mapping[str, Any], path: str) -> None:
        """Take this rank's part of the state of a whole model's optimizer."""
        theirs = [list(group["params"]) for group in whole["param_groups"]]
        saved, wanted = ([len(group) for group in groups] for groups in (theirs, self._groups))
        if saved != wanted:
            raise CheckpointError(
                f"{path} has {len(saved)} parameter groups with {saved} members, and the optimizer of this model has "
                f"{len(wanted)} with {wanted}; resume with the model and the optimizer that were saved",
                path=path,
            )
        numbers = {
            name: number
            for names, members in zip(self._groups, theirs, strict=True)
            for name, number in zip(names, members, strict=True)
        }
        state = self._optimizer.state_dict()
        state["state"] = {}
        for members, options, ours in zip(self._members, whole["param_groups"], state["param_groups"], strict=True):
            ours.update({key: value for key, value in options.items() if key != "params"})
            for (name, parameter), number in zip(members, ours["params"], strict=False):
                values = whole["state"].get(numbers[name])
                if values is not None:
                    state["state"][number] = {key: self._part(value, parameter) for key, value in values.items()}
        self._optimizer.load_state_dict(state)

    def _part(self, value: Any, parameter: nn.Parameter) -> Any:
        is_alike = isinstance(value, Tensor) and value.shape == parameter.shape
        return self._pipe.deployment.replication.part_of(value, parameter) if is_alike else value


class Misfits(NamedTuple):
    """As torch's own `load_state_dict` returns it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_own(pipe: Pipeline, state: Mapping[str, Any]) -> Misfits:
    """Load what the stages of this process hold; what `state` lacks stays as it was, and is told.

    A tied weight may be there under any of its names.
    """
    first = pipe.state.first_names()
    known = {first.get(name, name): value for name, value in state.items()}
    own = pipe.state_dict()
    every = {name for holding in pipe.deployment.staged.holdings() for name in holding.names.values()}
    every |= {first.get(name, name) for name in every}
    pipe.load_state_dict({name: known.get(first.get(name, name), value) for name, value in own.items()})
    missing = [name for name in own if first.get(name, name) not in known]
    return Misfits(missing, [name for name in state if name not in every])
