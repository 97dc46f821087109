"""What this process owns of the model, under the model's own names.

A pipeline looks like the module that it was made of: parameters, buffers, state, gradients and
modes, restricted to the stages that live here. On threads that is all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelError, UsageError
from penstock.model.lazy import Init, is_lazy, materialise
from penstock.model.original.placeholders import Home
from penstock.pipeline.deployment import Deployment
from penstock.pipeline.model_state.full_tensors import WholeModel
from penstock.pipeline.model_state.other_ranks import OtherRanksValues
from penstock.runtime.loss.module import LOSS
from penstock.runtime.optim.groups import group_parameters
from penstock.runtime.optim.norms import (
    NormAnswer,
    check_finite,
    check_limit,
    join_norms,
    local_part,
    norm_order,
    scale_down,
    sparse_gradient,
)

if TYPE_CHECKING:
    from penstock.runtime.optim.scaler import LossScale


class ModelState:
    """The model's values in this process. `without_values`: names of parameters that were built lazily, so far."""

    nothing = nn.Parameter(torch.empty(0, device="cpu"))  # stands for no parameter; never has a gradient

    def __init__(self, deployment: Deployment, keep_model: bool) -> None:
        self.deployment = deployment
        self.other_ranks = OtherRanksValues(keep_model)
        self.scaler: LossScale | None = None  # puts itself here
        self.without_values: set[str] = set()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of the stages that this process owns, each parameter once."""
        seen: set[int] = set()
        for holding in self.deployment.holdings():
            for name, parameter in holding.module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    full = holding.names[name]
                    yield self.deployment.staged.aliases.get(full, full), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """What to give to the optimizer of this process.

        Where no parameter lives here, one without elements: torch's optimizers refuse an empty list, and every rank
        wants one.
        """
        own = [parameter for _, parameter in self.named_parameters()]
        return iter(own or [self.nothing])

    def parameter_groups(self, rules: Mapping[Any, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Groups for a torch optimizer, by name: `{"*.bias": {"weight_decay": 0.0}}`.

        A key is a pattern of names in the whole model (`*`, `?`, `[...]`), a compiled regular expression, a function
        of (name, parameter), or a tuple of these. The first that matches counts; what none matches is the last
        group. Every rank has all groups, in the same order, with the parameters that it owns.
        """
        aliases = self.first_names()
        here = [(aliases.get(name, name), parameter) for name, parameter in self.named_parameters()]
        return group_parameters(rules or {}, here, self.every_parameter().items(), aliases)

    def every_parameter(self) -> dict[str, nn.Parameter]:
        """The parameters of the whole model by their first names; those of other ranks may have no values here."""
        aliases = self.first_names()
        every: dict[str, nn.Parameter] = {}
        for holding in self.deployment.staged.holdings():
            for name, parameter in holding.module.named_parameters(remove_duplicate=False):
                full = holding.names.get(name, name)
                every.setdefault(aliases.get(full, full), parameter)
        return every

    def first_names(self) -> dict[str, str]:
        """Of every parameter that stands in several places of the whole model: other name -> first name."""
        first: dict[int, str] = {}
        others: dict[str, str] = {}
        aliases, holdings = self.deployment.staged.aliases, self.deployment.staged.holdings()
        for holding in holdings:
            for name, parameter in holding.module.named_parameters(remove_duplicate=False):
                full = holding.names[name]
                full = aliases.get(full, full)
                known = first.setdefault(id(parameter), full)
                if known != full:
                    others[full] = known
        for (
            group
        ) in self.deployment.tied.places:  # by name: where tensors are spread, another object takes a parameter's place
            names = [holdings[number].names[name] for number, name in group]
            own = [others.get(name, aliases.get(name, name)) for name in names]
            others.update({name: own[0] for name in (*names, *own) if name != own[0]})
        return {**{name: others.get(own, own) for name, own in aliases.items()}, **others}

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(name, buffer) of the stages that this process owns, each buffer once."""
        seen: set[int] = set()
        for holding in self.deployment.holdings():
            for name, buffer in holding.module.named_buffers():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield holding.names[name], buffer

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers of the stages that this process owns, and of a loss function that has some."""
        self.deployment.ranks.wait_for_late_ranks()
        state = {
            holding.names.get(name, name): value
            for holding in self.deployment.holdings()
            for name, value in holding.module.state_dict().items()
        }
        return state | {name: state[own] for name, own in self.deployment.staged.repeated.items() if own in state}

    def full_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """The state of the whole model, under its own names, as a copy on the CPU; called on every rank.

        All ranks get it, or only `rank` (of the first replica), and the others an empty dict. Sharded and spread
        parameters are whole in it; buffers are those of the first replica. The loss function's own are not in it.
        """
        self.check_values()
        return WholeModel(self, rank, "full_state_dict()").state()

    def full_tensors(self, rank: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the whole model, one at a time, in an order that all ranks walk together."""
        self.check_values()
        pairs = WholeModel(self, rank, "full_tensors()")
        return ((name, value) for name, value in pairs if isinstance(value, Tensor))

    def fill_model(self, rank: int | None = None) -> None:
        """Give the model that the pipeline was made of all its values again, until the next step; on every rank.

        In all processes, or only in that of `rank` (of the first replica).
        """
        self.check_values()
        self.other_ranks.fill(self, rank)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this process's part of a whole model's state; a name that no stage knows is an error.

        A state without the loss function's own leaves that as it is.
        """
        self.deployment.ranks.wait_for_late_ranks()
        holdings, loss = self.deployment.holdings(), self.deployment.staged.loss
        known = {name for holding in self.deployment.staged.holdings() for name in holding.names.values()} | set(
            self.deployment.staged.repeated
        )
        if loss is None:  # a state that was saved with one
            state = {name: value for name, value in state.items() if name in known or not name.startswith(f"{LOSS}.")}
        elif not set(loss.names.values()) & set(state):  # a state of the model alone
            holdings = [holding for holding in holdings if holding is not loss]
        foreign = sorted(set(state) - known)
        missing = sorted(
            full
            for holding in holdings
            for name in holding.module.state_dict()
            if (full := holding.names.get(name, name)) not in state
        )
        wrong = [text for holding in holdings for text in _misfits(holding.module, holding.names, state)]
        if foreign or missing or wrong:
            raise ModelError(
                f"the state does not fit the model: missing {missing or 'none'}, unknown {foreign or 'none'}, "
                f"of another shape {wrong or 'none'}; nothing was loaded here"
            )
        # of a step that failed; else a value that a unit had before it would not count as new
        self.deployment.ranks.give_back()
        part_of = self.deployment.replication.part_of
        for module, names in ((holding.module, holding.names) for holding in holdings):
            module.load_state_dict(
                {name: part_of(state[names.get(name, name)], own) for name, own in module.state_dict().items()}
            )
        self.deployment.replication.loaded([state[name] for name, _ in self.named_parameters() if name in state])
        self.loaded()

    def loaded(self) -> None:
        """This process's stages have got values of which other stages' tensors here know nothing."""
        self.without_values = set()
        self.other_ranks.let_go(self.deployment)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this process's parameters."""
        self.deployment.ranks.wait_for_late_ranks()
        for holding in self.deployment.holdings():
            holding.module.zero_grad(set_to_none)

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
        kind = "" if order == 2.0 else f", {order:g}"
        with self.deployment.world.calling(f"clip_grad_norm_({limit:g}{kind})"):
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
        refused = sparse_gradient(self.named_parameters())
        if refused is not None:
            raise UsageError(refused)
        held = [local_part(parameter) for parameter in self.parameters() if parameter.grad is not None]
        if held:  # torch has an error for none
            nn.utils.clip_grad_value_(held, limit, foreach)

    def grad_norm(self, norm_type: float | str = 2.0, foreach: bool | None = None) -> Tensor:
        """The norm of all gradients of the whole model, the same on every rank; changes nothing."""
        order = norm_order(norm_type)
        with self.deployment.world.calling("grad_norm()"):
            norm = self.partial_norm(order, foreach)
            return join_norms(self.deployment.world.all_gather("grad_norm()", norm), order)

    def partial_norm(self, order: float, foreach: bool | None = None) -> NormAnswer:
        """The norm of this process's gradients, with each tied parameter counted on one rank; None without any."""
        refused = sparse_gradient(self.named_parameters())
        if refused is not None:
            return refused
        counted = filter(self.deployment.tied.counts, self.parameters())
        gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
        return self.deployment.replication.norm(gradients, order, foreach)

    def train(self, mode: bool = True) -> None:
        """Put the model into training mode, or out of it, as its own `train` does."""
        model = self.deployment.staged.model
        whole = [model] if isinstance(model, nn.Module) else model
        for module in (*whole, *(holding.module for holding in self.deployment.holdings())):
            module.train(mode)

    def materialise(self, model: nn.Module | Sequence[nn.Module], init: Init | None) -> None:
        """Parameters that were built under `lazy()` get memory on their rank, and values if `init` has some."""
        deployment = self.deployment
        built = [holding for holding in deployment.staged.holdings() if is_lazy(holding.module)]
        if not built:
            if init is not None:
                raise UsageError(
                    "init= fills parameters that were built under penstock.lazy(), and this model has none"
                )
            return
        ranks, cpu = deployment.ranks.executors, torch.device("cpu")
        mine: dict[int, tuple[str, torch.device]] = {}
        others: dict[int, Home] = {}
        for holding in built:
            rank = deployment.placement.rank_of(holding.stage)
            for name, parameter in holding.module.named_parameters():
                if rank in ranks:
                    mine.setdefault(id(parameter), (holding.names[name], deployment.devices.get(rank, cpu)))
                else:
                    others.setdefault(id(parameter), Home(holding.names[name], rank, holding.stage))
        roots = [
            *([model] if isinstance(model, nn.Module) else model),
            *(each.module for each in deployment.staged.holdings()),
        ]
        self.without_values = set(materialise(roots, mine, others, deployment.devices.get(min(ranks), cpu), init))

    def check_values(self) -> None:
        """Refuse to go on while parameters have no values, or while a rank is still in a step that failed."""
        self.deployment.ranks.wait_for_late_ranks()
        if self.without_values:
            some = ", ".join(sorted(self.without_values)[:3])
            raise UsageError(
                f"{len(self.without_values)} parameters were built lazily and have no values yet ({some}, ...); "
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
