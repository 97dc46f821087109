"""What this process owns of the model, under the model's own names.

A pipeline looks like the module that it was made of: parameters, buffers, state, gradients and
modes, restricted to the stages that live here. On threads that is all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from penstock.errors import ModelError, UsageError
from penstock.model.lazy import is_lazy, materialise, stands_for
from penstock.model.replay.part import ReplayPart
from penstock.model.split import Split
from penstock.runtime.crew import Crew
from penstock.runtime.groups import group_parameters
from penstock.runtime.norms import check_finite, check_limit, here, join_norms, norm_order, scale_down
from penstock.runtime.replication import Alone
from penstock.runtime.tied import TiedParameters
from penstock.runtime.world import World

if TYPE_CHECKING:
    from penstock.runtime.scaler import GradScaler

__all__ = ["OwnedState"]


class OwnedState:
    """The part of `Pipeline` that is about the model's values."""

    split: Split
    crew: Crew
    world: World
    tied: TiedParameters
    replicas: Alone
    devices: dict[int, torch.device]
    scaler: GradScaler | None = None  # puts itself here
    _without_values: set[str]
    _nothing = nn.Parameter(torch.empty(0))  # never has a gradient

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of the stages that this process owns, each parameter once."""
        seen: set[int] = set()
        for index, module in self.crew.modules().items():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    full = self.split.parts[index].names[name]
                    yield self.split.aliases.get(full, full), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """What to give to the optimizer of this process.

        Where no parameter lives here, one without elements: torch's optimizers refuse an empty list, and every rank
        wants one.
        """
        own = [parameter for _, parameter in self.named_parameters()]
        return iter(own or [self._nothing])

    def parameter_groups(self, rules: Mapping[Any, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Groups for a torch optimizer, by name: `{"*.bias": {"weight_decay": 0.0}}`.

        A key is a pattern of names in the whole model (`*`, `?`, `[...]`), a compiled regular expression, a function
        of (name, parameter), or a tuple of these. The first that matches counts; what none matches is the last
        group. Every rank has all groups, in the same order, with the parameters that it owns.
        """
        first: dict[int, str] = {}  # a tied parameter goes by the name that it has first
        every: dict[str, nn.Parameter] = {}
        aliases = dict(self.split.aliases)
        for part in self.split.parts:
            for name, parameter in part.module.named_parameters(remove_duplicate=False):
                own = part.names.get(name, name)
                full = self.split.aliases.get(own, own)
                known = first.setdefault(id(stands_for(parameter)), full)
                if known != full:
                    aliases[full] = known
                else:
                    every.setdefault(full, parameter)
        here = [(first[id(stands_for(parameter))], parameter) for _, parameter in self.named_parameters()]
        return group_parameters(rules or {}, here, every.items(), aliases)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(name, buffer) of the stages that this process owns."""
        for index, module in self.crew.modules().items():
            for name, buffer in module.named_buffers():
                yield self.split.parts[index].names[name], buffer

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers of the stages that this process owns."""
        state = {
            self.split.parts[index].names.get(name, name): value
            for index, module in self.crew.modules().items()
            for name, value in module.state_dict().items()
        }
        return state | {name: state[own] for name, own in self.split.repeated.items() if own in state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this process's part of a whole model's state; a name that no stage knows is an error."""
        known = {name for part in self.split.parts for name in part.names.values()}
        foreign = sorted(set(state) - known - set(self.split.repeated))
        own = {index: self.split.parts[index].names for index in self.crew.modules()}
        missing = sorted(
            names.get(name, name)
            for index, names in own.items()
            for name in self.crew.modules()[index].state_dict()
            if names.get(name, name) not in state
        )
        wrong = [text for index, names in own.items() for text in _misfits(self.crew.modules()[index], names, state)]
        if foreign or missing or wrong:
            raise ModelError(
                f"the state does not fit the model: missing {missing or 'none'}, unknown {foreign or 'none'}, "
                f"of another shape {wrong or 'none'}; nothing was loaded here"
            )
        self.crew.give_back()  # of a step that failed; else a value that a unit had before it would not count as new
        for index, module in self.crew.modules().items():
            names = self.split.parts[index].names
            part_of = self.replicas.part_of
            module.load_state_dict(
                {name: part_of(state[names.get(name, name)], own) for name, own in module.state_dict().items()}
            )
        self.replicas.loaded([state[name] for name, _ in self.named_parameters() if name in state])
        self._without_values = set()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this process's parameters."""
        for module in self.crew.modules().values():
            module.zero_grad(set_to_none)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float | str = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale all gradients of the whole model so that their norm is at most `max_norm`; returns the norm.

        On every rank: the norm is that of all ranks' gradients, with each tied parameter counted once.
        """
        limit, order = check_limit("max_norm", max_norm), norm_order(norm_type)
        if self.scaler is not None:
            self.scaler.check_unscaled("clip_grad_norm_()")
        total = self.grad_norm(order, foreach)
        if error_if_nonfinite:
            check_finite(total, order)
        scale_down(self.parameters(), limit, total, foreach)
        return total

    def clip_grad_value_(self, clip_value: float, foreach: bool | None = None) -> None:
        """Clamp every entry of the gradients to [-clip_value, clip_value]; each rank does its own."""
        limit = check_limit("clip_value", clip_value)
        if self.scaler is not None:
            self.scaler.check_unscaled("clip_grad_value_()")
        held = [here(parameter) for parameter in self.parameters() if parameter.grad is not None]
        if held:  # torch has an error for none
            nn.utils.clip_grad_value_(held, limit, foreach)

    def grad_norm(self, norm_type: float | str = 2.0, foreach: bool | None = None) -> Tensor:
        """The norm of all gradients of the whole model, the same on every rank; changes nothing."""
        order = norm_order(norm_type)
        counted = filter(self.tied.counts, self.parameters())
        gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
        said = self.replicas.norm(gradients, order, foreach)
        return join_norms(self.world.told("clip_grad_norm_()", said), order)

    def train(self, mode: bool = True) -> Self:
        """Put the stages into training mode, or out of it."""
        for module in self.crew.modules().values():
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the stages into eval mode."""
        return self.train(False)

    def _materialise(self, init: Callable[[str, Tensor], Any] | None) -> set[str]:
        """Put the local stages where they belong; parameters built under `lazy()` get memory here."""
        if init is not None and not any(is_lazy(part.module) for part in self.split.parts):
            raise UsageError("init= fills parameters that were built under penstock.lazy(), and this model has none")
        made: dict[int, nn.Parameter] = {}
        missing: set[str] = set()
        for rank, executor in self.crew.executors.items():
            device = self.devices.get(rank)
            for stage in executor.stages.values():
                if is_lazy(stage.module):
                    home = device or torch.device("cpu")
                    missing |= set(materialise(stage.module, stage.part.names, home, init, made))
                if device is not None:
                    stage.module.to(device)
        for executor in self.crew.executors.values():
            for stage in executor.stages.values():
                if isinstance(stage.part, ReplayPart):
                    stage.part.settle()
        return missing

    def _check_values(self) -> None:
        if self._without_values:
            some = ", ".join(sorted(self._without_values)[:3])
            raise UsageError(
                f"{len(self._without_values)} parameters were built lazily and have no values yet ({some}, ...); "
                f"call load_state_dict(...), or pass init=function(name, tensor)"
            )


def _misfits(module: nn.Module, names: Mapping[str, str], state: Mapping[str, Any]) -> Iterator[str]:
    """Tensors of another shape than the module's. A module that loads in its own way may know what to do with them."""
    for place, holder in module.named_modules():
        own_way = type(holder)._load_from_state_dict is not nn.Module._load_from_state_dict
        if own_way or holder._load_state_dict_pre_hooks:
            continue
        for table in (holder._parameters, holder._buffers):
            for name, own in table.items():
                full = names.get(f"{place}.{name}" if place else name, name)
                given = state.get(full)
                if not isinstance(own, Tensor) or not isinstance(given, Tensor):
                    continue
                if own.shape != given.shape and (own.dim(), *given.shape) != (0, 1):  # as torch had scalars once
                    yield f"{full} {tuple(given.shape)}, not {tuple(own.shape)}"
