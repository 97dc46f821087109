"""Parameters that live on several ranks, kept one: tied weights, blocks that are used twice.

On threads they are one object and autograd adds. On processes each rank has its own copy, so
after a step every rank that has one sends what this step added to the others, and all add the
contributions in the order of ranks: the sums are the same bits everywhere, so equal copies stay
equal for ever. Only this step's part is exchanged, so several steps before one optimizer step
add as usual; a rank without a gradient says so instead of keeping the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model.staged_model import StagedModel
from penstock.runtime.optim.norms import like, local_of
from penstock.runtime.transport import Channel, Transport
from penstock.schedule import Placement

# a number among the holdings of a staged model, which begin with the stages; and a parameter's name there
ParameterUse = tuple[int, str]


def tied_places(staged: StagedModel) -> list[list[ParameterUse]]:
    """Find where each parameter stands that stands in several stages."""
    places: dict[int, list[ParameterUse]] = {}
    for number, holding in enumerate(staged.holdings()):
        for name, parameter in holding.module.named_parameters():
            places.setdefault(id(parameter), []).append((number, name))
    return [group for group in places.values() if len(group) > 1]


class TiedParameters:
    """The groups of one pipeline; `transport` is None where ranks are threads."""

    def __init__(
        self,
        staged: StagedModel,
        placement: Placement,
        transport: Transport | None,
        places: Iterable[Sequence[ParameterUse]],
    ) -> None:
        # Places of every parameter that several stages hold.
        self.places = [tuple(group) for group in places]
        self._transport = transport
        self.groups: list[tuple[nn.Parameter | None, tuple[int, ...]]] = []  # None: of other ranks
        self._second: set[int] = set()  # copies that another rank counts
        if transport is None:
            return
        holdings = staged.holdings()
        for group in self.places:
            rank_of = {number: placement.rank_of(holdings[number].stage) for number, _ in group}
            ranks = tuple(sorted(set(rank_of.values())))
            if len(ranks) > 1:
                own = [place for place in group if rank_of[place[0]] == transport.rank]
                mine = [holdings[number].module.get_parameter(name) for number, name in own]
                self.groups.append((mine[0] if mine else None, ranks))
        self._second = {id(parameter) for parameter, ranks in self.groups if transport.rank != ranks[0]}
        self._channels = [
            Channel(number, number, "B", source, target)
            for number, (_, ranks) in enumerate(self.groups)
            for source in ranks
            for target in ranks
            if source != target
        ]

    def counts(self, parameter: Tensor) -> bool:
        """Return whether this rank counts the parameter in norms: one rank of each group does."""
        return id(parameter) not in self._second

    def make_equal(self) -> None:
        """Give all copies the value of the first rank's; once, before the first step."""
        if self.groups:
            with torch.no_grad():
                own = [None if parameter is None else local_of(parameter).detach() for parameter, _ in self.groups]
                for (parameter, ranks), values in zip(self.groups, self._share(own), strict=True):
                    if parameter is None or values is None:
                        continue
                    for value in values.values():
                        _check_alike(parameter, value)
                    first = values[ranks[0]]
                    assert first is not None
                    local_of(parameter).detach().copy_(first)

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Surround a step: afterwards each copy's gradient has what all ranks added to it."""
        if not self.groups:
            yield
            return
        own = [(number, parameter) for number, (parameter, _) in enumerate(self.groups) if parameter is not None]
        before = [parameter.grad for _, parameter in own]
        for _, parameter in own:
            parameter.grad = None
        try:
            yield
        except BaseException:
            for (_, parameter), gradient in zip(own, before, strict=True):
                parameter.grad = gradient
            raise
        mine: list[Tensor | None] = [None] * len(self.groups)
        for number, parameter in own:
            mine[number] = None if parameter.grad is None else local_of(parameter.grad).detach()
        added = self._share(mine)
        for (number, parameter), earlier in zip(own, before, strict=True):
            parts = added[number] or {}
            total = None if earlier is None else local_of(earlier).detach()
            for rank in sorted(parts):
                part = parts[rank]
                if part is not None:
                    total = part if total is None else total + part
            parameter.grad = None if total is None else like(parameter, total)

    def _share(self, mine: list[Tensor | None]) -> list[dict[int, Tensor | None] | None]:
        """Return every member's tensor of each group, by rank; None for groups that this rank is not in."""
        transport = self._transport
        assert transport is not None
        transport.open(self._channels)
        for number, channel in enumerate(self._channels):
            if channel.target_rank == transport.rank:
                transport.post(number, 0)
        for number, channel in enumerate(self._channels):
            if channel.source_rank == transport.rank:
                transport.send(number, 0, mine[channel.source_stage])
        found: list[dict[int, Tensor | None] | None] = [
            {transport.rank: mine[number]} if transport.rank in ranks else None
            for number, (_, ranks) in enumerate(self.groups)
        ]
        for number, channel in enumerate(self._channels):
            members = found[channel.target_stage]
            if channel.target_rank == transport.rank and members is not None:
                members[channel.source_rank] = transport.receive(number, 0)
        transport.flush()
        transport.exchange(None)
        return found


def _check_alike(parameter: nn.Parameter, value: Tensor | None) -> None:
    mine = local_of(parameter).detach()
    if value is not None and mine.shape != value.shape:
        raise ModelError(
            f"a parameter that is tied across ranks has {tuple(mine.shape)} on one and {tuple(value.shape)} on "
            f"another: ParallelOptions(tensor_plan=) must spread all of its modules alike"
        )
