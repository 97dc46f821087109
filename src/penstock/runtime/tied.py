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
from penstock.model.lazy import stands_for
from penstock.model.split import Split
from penstock.runtime.transport import Channel, Transport
from penstock.schedule import Placement

__all__ = ["TiedParameters", "tied_places"]


Place = tuple[int, str]  # a stage, and the name of a parameter there


def tied_places(split: Split) -> list[list[Place]]:
    """Where each parameter stands that stands in several stages."""
    places: dict[int, list[Place]] = {}
    for index, part in enumerate(split.parts):
        for name, parameter in part.module.named_parameters():
            places.setdefault(id(stands_for(parameter)), []).append((index, name))
    return [group for group in places.values() if len(group) > 1]


class TiedParameters:
    """The groups of one pipeline; `transport` is None where ranks are threads."""

    def __init__(
        self, split: Split, placement: Placement, transport: Transport | None, places: Iterable[Sequence[Place]]
    ) -> None:
        self.places = [tuple(group) for group in places]  # of every parameter that several stages hold
        self._transport = transport
        self._groups: list[tuple[nn.Parameter, tuple[int, ...]]] = []
        self._second: set[int] = set()  # copies that another rank counts
        if transport is None:
            return
        for group in self.places:
            ranks = tuple(sorted({placement.rank_of(stage) for stage, _ in group}))
            if len(ranks) > 1:
                own = [place for place in group if placement.rank_of(place[0]) == transport.rank]
                stage, name = (own or group)[0]
                self._groups.append((split.parts[stage].module.get_parameter(name), ranks))
        self._second = {id(parameter) for parameter, ranks in self._groups if transport.rank != ranks[0]}
        self._channels = [
            Channel(number, number, "B", source, target)
            for number, (_, ranks) in enumerate(self._groups)
            for source in ranks
            for target in ranks
            if source != target
        ]

    def counts(self, parameter: Tensor) -> bool:
        """Whether this rank counts the parameter in norms: one rank of each group does."""
        return id(parameter) not in self._second

    def make_equal(self) -> None:
        """All copies take the value of the first rank's; once, before the first step."""
        if self._groups:
            with torch.no_grad():
                for (parameter, ranks), values in zip(
                    self._groups, self._share([_here(parameter) for parameter, _ in self._groups]), strict=True
                ):
                    for value in () if values is None else values.values():
                        _check_alike(parameter, value)
                    first = None if values is None else values[ranks[0]]
                    if first is not None:
                        _here(parameter).copy_(first)

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Around a step: afterwards each copy's gradient has what all ranks added to it."""
        if not self._groups:
            yield
            return
        before = [parameter.grad for parameter, _ in self._groups]
        for parameter, _ in self._groups:
            parameter.grad = None
        try:
            yield
        except BaseException:
            for (parameter, _), gradient in zip(self._groups, before, strict=True):
                parameter.grad = gradient
            raise
        added = self._share([None if p.grad is None else _here(p.grad) for p, _ in self._groups])
        for (parameter, _), earlier, parts in zip(self._groups, before, added, strict=True):
            if parts is None:
                continue
            total = None if earlier is None else _here(earlier)
            for rank in sorted(parts):
                part = parts[rank]
                if part is not None:
                    total = part if total is None else total + part
            parameter.grad = None if total is None else _like(parameter, total)

    def _share(self, mine: list[Tensor | None]) -> list[dict[int, Tensor | None] | None]:
        """Every member's tensor of each group, by rank; None for groups that this rank is not in."""
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
            for number, (_, ranks) in enumerate(self._groups)
        ]
        for number, channel in enumerate(self._channels):
            members = found[channel.target_stage]
            if channel.target_rank == transport.rank and members is not None:
                members[channel.source_rank] = transport.receive(number, 0)
        transport.flush()
        transport.exchange(None)
        return found


def _check_alike(parameter: nn.Parameter, value: Tensor | None) -> None:
    mine = _here(parameter)
    if value is not None and mine.shape != value.shape:
        raise ModelError(
            f"a parameter that is tied across ranks has {tuple(mine.shape)} on one and {tuple(value.shape)} on "
            f"another: tensor_plan= must spread all of its modules alike"
        )


def _here(tensor: Tensor) -> Tensor:
    """Of a tensor that is spread over ranks, the part of this one."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part.detach()


def _like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """This rank's part as the same kind of tensor as the parameter."""
    if not hasattr(parameter, "_local_tensor"):
        return value
    made = torch.empty_like(parameter)
    _here(made).copy_(value)
    return made.detach()
