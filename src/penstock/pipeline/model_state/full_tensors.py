"""The whole model, one tensor at a time: what all ranks have together, under the model's own names.

Ranks own different stages, replicas have copies of them, shards and spread tensors are parts. Here all of that becomes
one sequence of (name, tensor) that every rank enters together and walks in the same order. The full state in memory
and the folder for transformers are made of the same values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from penstock.errors import UsageError
from penstock.pipeline.model_state.carry import carried
from penstock.rules import is_index

if TYPE_CHECKING:
    from penstock.pipeline.deployment import Deployment
    from penstock.pipeline.model_state.state import ModelState


class WholeValues:
    """The values of this rank's stages, each whole, under the first of its names; without the loss function's own."""

    def __init__(self, state: ModelState) -> None:
        self._deployment = deployment = state.deployment
        self.first = state.first_names()
        loss = deployment.staged.loss
        apart = set() if loss is None else set(loss.names.values())
        self.every = {name: value for name, value in state.state_dict().items() if name not in apart}
        self.own = {self.first.get(name, name): value for name, value in self.every.items()}
        self._parameters = {
            self.first.get(full, full)
            for holding in deployment.holdings()
            for name, _ in holding.module.named_parameters(remove_duplicate=False)
            for full in (holding.names[name],)
        }

    def get(self, name: str) -> Any:
        """One value, on the CPU; every rank with a copy or a part of it asks for it at the same place of its order."""
        value = self.own[name]
        if not isinstance(value, Tensor):
            return value
        value = self._deployment.replication.whole(value)
        if name not in self._parameters:
            value = self._deployment.replication.first_has(value)
        return value.detach().cpu()


class WholeModel:
    """The values of all ranks, each once, in the model's order: to be walked by all ranks together.

    `rank`: the one of the first replica that gets them; None for all. `sources` is the rank that gives each value: the
    lowest of those that have it.
    """

    def __init__(self, state: ModelState, rank: int | None, call: str) -> None:
        self._deployment, self._call = state.deployment, call
        self.targets = targets_of(state.deployment, call, rank)
        self.values = WholeValues(state)
        first = self.values.first
        sources: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        there: dict[str, None] = {}
        sizes = [(name, _bytes(value)) for name, value in self.values.every.items()]
        for source, answer in enumerate(state.deployment.world.all_gather(call, sizes)):
            for name, size in answer:
                there[name] = None
                sources.setdefault(first.get(name, name), source)
                self._sizes[first.get(name, name)] = size
        # Ranks may hold stages out of order; within a stage, names are in the order of its module's own state.
        holdings = state.deployment.staged.holdings()
        stage_of = {name: holding.stage for holding in holdings for name in holding.names.values()}
        by_stage = sorted(there, key=lambda name: stage_of.get(name, len(holdings)))
        order = dict.fromkeys((*state.deployment.staged.order, *by_stage))
        self._names = [name for name in order if name in there]  # with every name of what has several
        self.sources = {name: sources[name] for name in dict.fromkeys(first.get(name, name) for name in self._names)}

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """(name, value), as copies on the CPU; a value that has several names comes under the first."""
        items = [(name, source, self.targets) for name, source in self.sources.items()]
        with self._deployment.world.calling(self._call):
            for name, value in carried(self._deployment.world.transport, items, self.values.get, self._sizes):
                yield name, value.clone() if isinstance(value, Tensor) else value

    def state(self) -> dict[str, Any]:
        """All of it at once, under all names; empty on a rank that gets none."""
        found = dict(self)
        return {name: found[self.values.first.get(name, name)] for name in self._names} if found else {}


def targets_of(deployment: Deployment, call: str, rank: int | None) -> list[int]:
    """The ranks of this pipeline that get the values: all, or one of the first replica's."""
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
