"""The part of a model that other ranks hold: let go when training begins, and brought back when it is asked for.

Until the first step the model is as it was given, on every process. From then on a rank has the true values of its own
stages only, so all others are let go (`placeholders`), or marked as old where the user wants to keep them. `fill` puts
values back into the tensors that were let go, and the next step lets go of them again. `WholeModel` is what all ranks
have together, under the model's own names: one sequence of (name, tensor) that every rank enters together and walks in
the same order. The full state in memory and the folder for transformers are made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.model.original.placeholders import Home, home_of, let_go, mark_kept, take_back
from penstock.model.staged_model import Holding, StagedModel
from penstock.pipeline.model_state.carry import carried, carry
from penstock.rules import is_index
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
        self.is_checked = False  # It is so on all ranks or on none, since all hear of it.
        self.is_filled = True  # the model has all its values here

    def check(self, deployment: Deployment) -> None:
        """Refuse, before a first step, stages of which another pipeline has put a part elsewhere."""

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
        """Let go of what other ranks hold: from now on this process has no values of it."""
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
        """Follow a new cut: this process holds other stages than before."""
        if not self.is_filled:
            self.is_filled = True
            self.let_go(deployment)

    def fill(self, state: ModelState, rank: int | None) -> None:
        """Put all values into the tensors of the model, on every rank or on one."""
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
        owners: dict[str, list[int]] = {}  # Ranks report them: a buffer that a forward has made may be on one only.
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
    """Yield all that a stage keeps, by every name that it has: tensors, and modules with a state of another kind."""
    module, names = holding.module, holding.names
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield names[name], parameter
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield names[name], buffer
    for place, holder in module.named_modules(remove_duplicate=False):
        if type(holder).get_extra_state is not nn.Module.get_extra_state:
            yield names[f"{place}._extra_state" if place else "_extra_state"], holder


def _module_at(staged: StagedModel, name: str) -> nn.Module:
    wanted = f"{name}.x" if name else "x"
    for holding in staged.holdings():
        module: nn.Module
        for path, module in holding.module.named_modules():
            if holding.names.get(f"{path}.x" if path else "x") == wanted:
                return module
    raise AssertionError(name)


def owners_of(staged: StagedModel, placement: Placement) -> dict[str, set[int]]:
    """Return the ranks that have what goes by a name."""
    found: dict[str, set[int]] = {}
    for holding in staged.holdings():
        for name, _ in _held_by(holding):
            found.setdefault(name, set()).add(placement.rank_of(holding.stage))
    return found


def held_on(staged: StagedModel, placement: Placement, rank: int) -> dict[str, Held]:
    here = [holding for holding in staged.holdings() if placement.rank_of(holding.stage) == rank]
    return {name: held for holding in here for name, held in _held_by(holding)}


class WholeModel:
    """The values of all ranks, each once, in the model's order: to be walked by all ranks together.

    `rank`: the one of the first replica that gets them; None for all. `own` are the values of this rank's stages under
    the first of their names, without the loss function's own; `sources` is the rank that gives each value: the lowest
    of those that have it.
    """

    def __init__(self, state: ModelState, rank: int | None, call: str) -> None:
        self._deployment, self._call = state.deployment, call
        deployment = state.deployment
        self.targets = targets_of(deployment, call, rank)
        self._first = first = state.first_names()
        loss, holdings = deployment.staged.loss, deployment.staged.holdings()
        apart = set() if loss is None else set(loss.names.values())
        every = {name: value for name, value in state.state_dict().items() if name not in apart}
        self.own = {first.get(name, name): value for name, value in every.items()}
        self._parameters = {
            first.get(full, full)
            for holding in deployment.holdings()
            for name, _ in holding.module.named_parameters(remove_duplicate=False)
            for full in (holding.names[name],)
        }
        sources: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        there: dict[str, None] = {}
        sizes = [(name, _bytes(value)) for name, value in every.items()]
        for source, answer in enumerate(deployment.world.all_gather(call, sizes)):
            for name, size in answer:
                there[name] = None
                sources.setdefault(first.get(name, name), source)
                self._sizes[first.get(name, name)] = size
        # Ranks may hold stages out of order; within a stage, names are in the order of its module's own state.
        stage_of = {name: holding.stage for holding in holdings for name in holding.names.values()}
        by_stage = sorted(there, key=lambda name: stage_of.get(name, len(holdings)))
        order = dict.fromkeys((*deployment.staged.order, *by_stage))
        self._names = [name for name in order if name in there]  # What has several names has all of them here.
        self.sources = {name: sources[name] for name in dict.fromkeys(first.get(name, name) for name in self._names)}

    def get(self, name: str) -> Any:
        """Return one of `own`, whole and on the CPU; who has a copy or a part asks at the same place of its order."""
        value = self.own[name]
        if not isinstance(value, Tensor):
            return value
        value = self._deployment.replication.whole(value)
        if name not in self._parameters:
            value = self._deployment.replication.first_has(value)
        return value.detach().cpu()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, value), as copies on the CPU; a value that has several names comes under the first."""
        items = [(name, source, self.targets) for name, source in self.sources.items()]
        with self._deployment.world.calling(self._call):
            for name, value in carried(self._deployment.world.transport, items, self.get, self._sizes):
                yield name, value.clone() if isinstance(value, Tensor) else value

    def state(self) -> dict[str, Any]:
        """Return all of it at once, under all names; empty on a rank that gets none."""
        found = dict(self)
        return {name: found[self._first.get(name, name)] for name in self._names} if found else {}


def targets_of(deployment: Deployment, call: str, rank: int | None) -> list[int]:
    """Return the ranks of this pipeline that get the values: all, or one of the first replica's."""
    ranks = deployment.schedule.ranks
    if rank is not None and not is_index(rank, ranks):
        raise UsageError(f"rank={rank!r}: pass one of the ranks 0 to {ranks - 1}, or None for all of them")
    asked = deployment.world.all_gather(call, rank) + deployment.replication.all_gather(call, rank)
    if any(other != rank for other in asked):
        raise UsageError(
            f"{call} was called with rank={rank} here and with {asked} on all; call it alike on every rank"
        )
    if rank is None or deployment.world.transport is None:
        return list(range(ranks))
    return [rank] if deployment.replication.leads else []


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
