"""The part of a model that other ranks hold: let go when training begins, and brought back when it is asked for.

Until the first step the model is as it was given, on every process. From then on a rank has the true values of its own
stages only, so all others are let go (`placeholders`), or marked as old where the user wants to keep them.
`fill` puts values back into the tensors that were let go, and the next step lets go of them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.model.original.placeholders import Home, home_of, let_go, mark_kept, take_back
from penstock.model.staged_model import Holding, StagedModel
from penstock.pipeline.model_state.carry import carry
from penstock.pipeline.model_state.full_tensors import targets_of
from penstock.runtime.state.memory_layout import copy_like
from penstock.schedule import Placement

if TYPE_CHECKING:
    from penstock.pipeline.deployment import Deployment
    from penstock.pipeline.model_state.state import ModelState

Held = Tensor | nn.Module  # a module stands for the state that it has beside tensors


class OtherRanksValues:
    """What this process has of other ranks' stages; `keep`: it stays in memory, as it was before the first step."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self.is_checked = False  # on all ranks or on none, since all hear of it
        self.is_filled = True  # the model has all its values here

    def check(self, deployment: Deployment) -> None:
        """Before a first step: what the stages here hold must not be where another pipeline has put it."""

        def look() -> None:
            for holding in deployment.holdings():
                for tensor in (*holding.module.parameters(), *holding.module.buffers()):
                    home = home_of(tensor)
                    if home is not None:
                        raise UsageError(
                            f"stage {holding.stage} is to be trained here, but another Pipeline of the same model "
                            f"trains {home.name} on {home}; give both the same cut and placement, or call fill_model() "
                            f"of the other one, on every rank, before this one goes on"
                        )

        deployment.world.same_on_all("step()", look, "")
        self.is_checked = True

    def let_go(self, deployment: Deployment) -> None:
        """From now on this process has no values of what other ranks hold."""
        if not self.is_filled or deployment.world.transport is None:
            return
        self.is_filled = False
        placement, here = deployment.placement, {holding.stage for holding in deployment.holdings()}
        own = {id(held) for holding in deployment.holdings() for _, held in _held_by(holding)}
        own |= {id(buffer) for stage in here for buffer in deployment.staged.parts[stage].reads()}
        gone = mark_kept if self._keep else let_go
        for holding in deployment.staged.holdings():
            for name, held in _held_by(holding):
                if isinstance(held, Tensor) and id(held) not in own:
                    gone(held, Home(name, placement.rank_of(holding.stage), holding.stage))
        for name, stage, old in deployment.replication.replaced:
            gone(old, Home(name, placement.rank_of(stage), stage, sharded=True))
        for stage in here:
            deployment.staged.parts[stage].settle()

    def moved(self, deployment: Deployment) -> None:
        """The pipeline has a new cut: this process holds other stages than before."""
        if not self.is_filled:
            self.is_filled = True
            self.let_go(deployment)

    def fill(self, state: ModelState, rank: int | None) -> None:
        """All values into the tensors of the model, on every rank or on one."""
        deployment = state.deployment
        call, transport = "fill_model()", deployment.world.transport
        self.is_checked = False
        targets = targets_of(deployment, call, rank)
        graded = any(parameter.grad is not None for parameter in state.parameters())
        if any(deployment.world.all_gather(call, graded)) and transport is not None:
            raise UsageError(
                "there are gradients: an optimizer step would change each rank's own stages, but not the copies that "
                "other ranks get; call zero_grad() before fill_model()"
            )
        if any(deployment.world.all_gather(call, bool(deployment.replication.replaced))):
            raise UsageError(
                "the stages' parameters are sharded or spread over ranks, so the model itself holds parts only; load "
                "pipe.full_state_dict() into a new model instead"
            )
        if transport is None:
            return
        own = held_on(deployment.staged, deployment.placement, transport.rank)
        owners: dict[str, list[int]] = {}  # as each rank says: a forward may have made buffers, which are on one only
        for source, names in enumerate(deployment.world.all_gather(call, list(own))):
            for name in names:
                owners.setdefault(name, []).append(source)
        every = {name: held for holding in deployment.staged.holdings() for name, held in _held_by(holding)}

        def take(name: str, value: Any) -> None:
            held = every.get(name)
            if held is None:
                holder, _, place = name.rpartition(".")
                _module_at(deployment.staged, holder).register_buffer(place, copy_like(value))
            elif isinstance(held, nn.Module):
                held.set_extra_state(value)
            elif home_of(held) is not None:
                with torch.no_grad():
                    take_back(held).copy_(value)

        items = [(name, min(ranks), [each for each in targets if each not in ranks]) for name, ranks in owners.items()]
        carry(transport, items, lambda name: _value(own[name]), take)
        self.is_filled = self.is_filled or transport.rank in targets


def _value(held: Held) -> Any:
    return held.detach().cpu() if isinstance(held, Tensor) else held.get_extra_state()


def _held_by(holding: Holding) -> Iterator[tuple[str, Held]]:
    """All that a stage keeps, by every name that it has: tensors, and modules with a state of another kind."""
    module, names = holding.module, holding.names
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield names[name], parameter
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield names[name], buffer
    for place, holder in module.named_modules(remove_duplicate=False):
        if type(holder).get_extra_state is not nn.Module.get_extra_state:
            yield names[f"{place}._extra_state" if place else "_extra_state"], holder


def _module_at(staged: StagedModel, name: str) -> nn.Module:
    """The module that has this name in the whole model."""
    wanted = f"{name}.x" if name else "x"
    for holding in staged.holdings():
        module: nn.Module
        for path, module in holding.module.named_modules():
            if holding.names.get(f"{path}.x" if path else "x") == wanted:
                return module
    raise AssertionError(name)


def owners_of(staged: StagedModel, placement: Placement) -> dict[str, set[int]]:
    """The ranks that have what goes by a name."""
    found: dict[str, set[int]] = {}
    for holding in staged.holdings():
        for name, _ in _held_by(holding):
            found.setdefault(name, set()).add(placement.rank_of(holding.stage))
    return found


def held_on(staged: StagedModel, placement: Placement, rank: int) -> dict[str, Held]:
    """What one rank has, by name."""
    here = [holding for holding in staged.holdings() if placement.rank_of(holding.stage) == rank]
    return {name: held for holding in here for name, held in _held_by(holding)}
