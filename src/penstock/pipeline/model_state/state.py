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
from penstock.pipeline.model_state.other_ranks import OtherRanksValues, WholeModel
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
        """Yield pairs of (name, parameter) for the stages that this process owns, each parameter once."""
        seen: set[int] = set()
        for holding in self.deployment.holdings():
            for name, parameter in holding.module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    full = holding.names[name]
                    yield self.deployment.staged.aliases.get(full, full), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of this process, for its optimizer. Never empty: torch's optimizers refuse that."""
        own = [parameter for _, parameter in self.named_parameters()]
        return iter(own or [self.nothing])

    def parameter_groups(self, rules: Mapping[Any, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Group this process's parameters for a torch optimizer, by name.

        A pattern is text with `*`, `?` and `[...]`, a compiled regular expression, a function of (name, parameter), or
        a tuple of these. Every rank has all groups, in the same order, with the parameters that it owns.

        Args:
            rules: A dict of patterns to options, such as `{"*.bias": {"weight_decay": 0.0}}`. The first pattern that
                matches decides; what matches none is in a last group.
        """
        aliases = self.first_names()
        here = [(aliases.get(name, name), parameter) for name, parameter in self.named_parameters()]
        return group_parameters(rules or {}, here, self.every_parameter().items(), aliases)

    def every_parameter(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the whole model by their first names; those of other ranks may be away."""
        aliases = self.first_names()
        every: dict[str, nn.Parameter] = {}
        for holding in self.deployment.staged.holdings():
            for name, parameter in holding.module.named_parameters(remove_duplicate=False):
                full = holding.names.get(name, name)
                every.setdefault(aliases.get(full, full), parameter)
        return every

    def first_names(self) -> dict[str, str]:
        """Map every other name of a parameter that stands in several places of the whole model to the first."""
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
        # They go by name: where tensors are spread, another object takes a parameter's place.
        for group in self.deployment.tied.places:
            names = [holdings[number].names[name] for number, name in group]
            own = [others.get(name, aliases.get(name, name)) for name in names]
            others.update({name: own[0] for name in (*names, *own) if name != own[0]})
        return {**{name: others.get(own, own) for name, own in aliases.items()}, **others}

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield pairs of (name, buffer) for the stages that this process owns, each buffer once."""
        seen: set[int] = set()
        for holding in self.deployment.holdings():
            for name, buffer in holding.module.named_buffers():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield holding.names[name], buffer

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers of the stages that this process owns, under the model's own names.

        Those of a loss function that has some are among them.
        """
        self.deployment.ranks.wait_for_late_ranks()
        state = {
            holding.names.get(name, name): value
            for holding in self.deployment.holdings()
            for name, value in holding.module.state_dict().items()
        }
        return state | {name: state[own] for name, own in self.deployment.staged.repeated.items() if own in state}

    def full_state_dict(self, rank: int | None = None) -> dict[str, Any]:
        """Return the state of the whole model, as a copy on the CPU. Call it on every rank.

        Sharded and spread parameters are whole in it; buffers are those of the first replica.

        Args:
            rank: The rank that gets the state; the others get an empty dict. By default, every rank gets it.
        """
        self.check_values()
        return WholeModel(self, rank, "full_state_dict()").state()

    def full_tensors(self, rank: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the whole model, one tensor at a time. Every rank calls it and walks through all of it.

        The order is the same on all ranks. Each tensor is a copy on the CPU, whole where it is sharded or spread over
        ranks; a tied parameter comes once, under its first name. A rank never holds more than a few of them.

        Args:
            rank: The rank that gets the tensors; on the others the loop ends without any. By default, every rank gets
                them.

        Yields:
            Pairs of (name, tensor), under the model's own names.
        """
        self.check_values()
        pairs = WholeModel(self, rank, "full_tensors()")
        return ((name, value) for name, value in pairs if isinstance(value, Tensor))

    def fill_model(self, rank: int | None = None) -> None:
        """Give the original model all its values again, until the next step. Call it on every rank.

        Args:
            rank: The rank whose model is filled. By default, every rank's.
        """
        self.check_values()
        self.other_ranks.fill(self, rank)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this process's part of a whole model's state.

        Args:
            state: The state of the whole model, or of a part that has all that this process owns. A name that no stage
                has is an error. Without the loss function's own values, these stay as they are.
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
        # What a step that failed has left would keep a value that a unit had before from counting as new.
        self.deployment.ranks.give_back()
        part_of = self.deployment.replication.part_of
        for module, names in ((holding.module, holding.names) for holding in holdings):
            module.load_state_dict(
                {name: part_of(state[names.get(name, name)], own) for name, own in module.state_dict().items()}
            )
        self.deployment.replication.loaded([state[name] for name, _ in self.named_parameters() if name in state])
        self.loaded()

    def loaded(self) -> None:
        """Take note that this process's stages have got values of which other stages' tensors here know nothing."""
        self.without_values = set()
        self.other_ranks.let_go(self.deployment)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this process's parameters.

        Args:
            set_to_none: Whether `.grad` becomes `None`, as in torch, or a tensor of zeros.
        """
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
        """Scale all gradients of the whole model so that their norm is at most `max_norm`. Call it on every rank.

        Args:
            max_norm: The largest norm that is left as it is.
            norm_type: The order of the norm, such as 2.0 or `"inf"`.
            error_if_nonfinite: Whether a norm that is inf or NaN raises an error.
            foreach: Whether to use torch's foreach kernels. By default, torch decides.

        Returns:
            The norm before clipping, the same on every rank.
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
        """Clamp every entry of this process's gradients to the range from -`clip_value` to `clip_value`.

        Args:
            clip_value: The largest absolute value.
            foreach: Whether to use torch's foreach kernels. By default, torch decides.
        """
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
        """Return the norm of all gradients of the whole model, the same on every rank. Call it on every rank.

        Args:
            norm_type: The order of the norm, such as 2.0 or `"inf"`.
            foreach: Whether to use torch's foreach kernels. By default, torch decides.
        """
        order = norm_order(norm_type)
        with self.deployment.world.calling("grad_norm()"):
            norm = self.partial_norm(order, foreach)
            return join_norms(self.deployment.world.all_gather("grad_norm()", norm), order)

    def partial_norm(self, order: float, foreach: bool | None = None) -> NormAnswer:
        """Return the norm of this process's gradients, with each tied parameter counted on one rank."""
        refused = sparse_gradient(self.named_parameters())
        if refused is not None:
            return refused
        counted = filter(self.deployment.tied.counts, self.parameters())
        gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
        return self.deployment.replication.norm(gradients, order, foreach)

    def train(self, mode: bool = True) -> None:
        model = self.deployment.staged.model
        whole = [model] if isinstance(model, nn.Module) else model
        for module in (*whole, *(holding.module for holding in self.deployment.holdings())):
            module.train(mode)

    def materialise(self, model: nn.Module | Sequence[nn.Module], init: Init | None) -> None:
        """Give parameters that were built under `lazy()` memory on their rank, and values if `init` has some."""
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
    """Yield tensors of another shape than the module's. One that loads in its own way may know what to do with them."""
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
                if own.shape != given.shape and (own.dim(), *given.shape) != (
                    0,
                    1,
                ):  # The second is how torch had scalars once.
                    yield f"{full} {tuple(given.shape)}, not {tuple(own.shape)}"
