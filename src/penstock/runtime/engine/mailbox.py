"""Where a stage finds what it needs and leaves what it made.

A stage never knows whether its neighbour is on another rank: values from other ranks are
taken off their channel, values from this rank were put into the box, detached and without a
copy. The turn of a V is therefore an ordinary hand-over. All routes are worked out once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from time import perf_counter
from typing import Any, NamedTuple

import torch

from penstock.errors import PeerFailure, RunError
from penstock.runtime.transport import Channel, Transport
from penstock.runtime.transport.channel import ChannelEnds
from penstock.runtime.transport.handover import Rewritten, arrive, share
from penstock.runtime.transport.interrupts import CTRL_C, DUE
from penstock.schedule import Link, Placement, Topology, links
from penstock.schedule.action import Action, Op


class _Route(NamedTuple):
    """One neighbour of a stage: how its value comes, or goes."""

    other: int  # the stage at the other end
    channel: Any  # a number, or None: it lives on this rank
    exclusive: bool  # a message of its own, for nobody else


class ActionWait:
    """How long the action that runs has waited for messages, and when its last wait ended.

    `mark` records an event on the device, where kernels of the action come after what its stream waits for.
    """

    def __init__(self, mark: Callable[[], torch.Event] | None = None) -> None:
        self.seconds = 0.0
        self.ended = 0.0
        self.mark = mark
        self.event = None if mark is None else mark()

    def add(self, begin: float, end: float) -> None:
        """Count one wait."""
        self.seconds += end - begin
        self.ended = end
        if self.mark is not None:
            self.event = self.mark()


@lru_cache(maxsize=8)  # the ranks of one process ask for the same
def channels_of(
    placement: Placement, topology: Topology
) -> tuple[tuple[Channel, ...], Mapping[tuple[int, int, str], int], tuple[Link, ...]]:
    """All channels of a pipeline, the same on every rank; (stage, other end, direction) to their numbers; the links."""
    channels: list[Channel] = []
    numbers: dict[tuple[int, int, str], int] = {}
    crossing = links(placement, topology)
    for link in crossing:
        there = Channel(link.source, link.target, "F", link.source_rank, link.target_rank)
        back = Channel(link.target, link.source, "B", link.target_rank, link.source_rank)
        for channel in (there, back):  # the way back always has the next number
            numbers[channel.source_stage, channel.target_stage, channel.direction] = len(channels)
            channels.append(channel)
    return tuple(channels), numbers, crossing


class Mailbox:
    """Values between the stages of one rank and their neighbours, here or on other ranks."""

    def __init__(self, rank: int, placement: Placement, topology: Topology, transport: Transport) -> None:
        self._transport = transport
        self.channels, self._numbers, crossing = channels_of(placement, topology)
        self.ends = ChannelEnds()
        self._values: dict[tuple[str, int, int, int], Any] = {}  # direction, to, from, microbatch
        self.fetched: dict[tuple[str, int, int], dict[int, Any]] = {}  # taken before its computation: direction, stage
        self.waits: ActionWait | None = None  # where the step is recorded
        self.waited_for: tuple[str, int] | None = None  # the receive that brought a failure, and from which rank
        self._arriving: dict[tuple[str, int], list[_Route]] = {}  # by direction and stage
        self._leaving: dict[tuple[str, int], list[_Route]] = {}
        for stage in placement.stages_of(rank):
            producers = [self._route(crossing, source, stage, source) for source in topology.producers(stage)]
            consumers = [self._route(crossing, stage, target, target) for target in topology.consumers(stage)]
            self._arriving["F", stage], self._leaving["F", stage] = producers, consumers
            self._arriving["B", stage] = [*map(_back, consumers)]
            self._leaving["B", stage] = [*map(_back, producers)]

    def _route(self, crossing: tuple[Link, ...], source: int, target: int, other: int) -> _Route:
        for link in crossing:
            if link.source == source and target in link.targets:
                return _Route(other, self._numbers[link.source, link.target, "F"], len(link.targets) == 1)
        return _Route(other, None, False)

    def channel(self, action: Action) -> int:
        """The channel of a transfer action."""
        near, far = action.stage, action.other_end
        sends = action.op in (Op.SEND_F, Op.SEND_B)
        direction = "F" if action.op in (Op.SEND_F, Op.RECV_F) else "B"
        return self._numbers[(near, far, direction) if sends else (far, near, direction)]

    def open(self) -> bool:
        """Have the transport serve this pipeline's channels; whether `ends` has others than before."""
        before = self.ends
        self._transport.open(self.channels)
        self.ends = self._transport.ends
        return self.ends is not before

    @property
    def pending(self) -> list[tuple[int, int]]:
        """The receives under way, as channel and microbatch."""
        return [(number, microbatch) for number, end in self.ends.incoming.items() for microbatch in end.posted]

    @property
    def sends(self) -> list[tuple[int, int]]:
        """The sends under way, as channel and microbatch."""
        return [(number, microbatch) for number, end in self.ends.outgoing.items() for microbatch in end.under_way]

    def clear(self) -> None:
        """Drop everything, as after a failed step."""
        self.free()
        for end in self.ends.outgoing.values():
            end.ready.clear()
        self.waited_for = None

    def free(self) -> None:
        """Let go of what has come."""
        self._values.clear()
        self.fetched.clear()

    # -- in

    def fetch(self, direction: str, stage: int, microbatch: int) -> None:
        """Wait for what a computation needs, and keep it for that computation."""
        if (direction, stage, microbatch) not in self.fetched and (found := self.take(direction, stage, microbatch)):
            self.fetched[direction, stage, microbatch] = found

    def take(self, direction: str, stage: int, microbatch: int) -> dict[int, Any]:
        """By neighbour, the payload ("F") or the gradients ("B") for a stage; waits where it is still on its way."""
        if self.fetched and (direction, stage, microbatch) in self.fetched:
            return self.fetched.pop((direction, stage, microbatch))
        begin = 0.0 if self.waits is None else perf_counter()
        found: dict[int, Any] = {}
        for other, channel, exclusive in self._arriving[direction, stage]:
            try:
                if exclusive:  # as in any chain of stages
                    found[other] = self.ends.incoming[channel].receive(microbatch)
                elif channel is not None:
                    found[other] = self._take_shared(direction, stage, other, channel, microbatch)
                else:
                    found[other] = self._pop(direction, stage, other, microbatch)
                    if direction == "F":
                        value, ready = found[other]
                        found[other] = arrive(value, ready, None)
            except PeerFailure:
                edge = self.channels[channel]
                self.waited_for = edge.receive_action(microbatch), edge.source_rank
                raise
            except Rewritten:
                source = other if channel is None else self.channels[channel].source_stage
                raise Rewritten(source, microbatch) from None
            if CTRL_C.state is DUE:
                CTRL_C.raise_due()
        if self.waits is not None:
            self.waits.add(begin, perf_counter())
        return found

    def _take_shared(self, direction: str, stage: int, other: int, channel: int, microbatch: int) -> Any:
        """Out of a message that is for, or from, several stages of a rank; the first that asks receives it."""
        if (direction, stage, other, microbatch) not in self._values:
            for reader, payload in self.ends.incoming[channel].receive(microbatch).items():
                to, source = (reader, other) if direction == "F" else (stage, reader)
                self._values[direction, to, source, microbatch] = payload
        return self._pop(direction, stage, other, microbatch)

    def _pop(self, direction: str, to: int, source: int, microbatch: int) -> Any:
        try:
            return self._values.pop((direction, to, source, microbatch))
        except KeyError:
            what = "output" if direction == "F" else "gradient"
            raise RunError(
                f"stage {to} needs the {what} of stage {source} for microbatch {microbatch}, which is not there"
            ) from None

    # -- out

    def put_outputs(self, stage: int, microbatch: int, emitted: Mapping[int, Any]) -> None:
        """Hand over what stays on this rank; put up the rest for its SEND."""
        for route in self._leaving["F", stage]:
            payload = emitted[route.other]
            if route.channel is None:
                self._values["F", route.other, stage, microbatch] = share(payload)
            else:
                self._put_up(route, route.other, microbatch, payload)

    def put_gradients(self, stage: int, microbatch: int, back: Mapping[int, Any]) -> None:
        """Give each producing stage the gradients of what it sent."""
        for route in self._leaving["B", stage]:
            if route.channel is None:
                self._values["B", route.other, stage, microbatch] = back[route.other]
            else:
                self._put_up(route, stage, microbatch, back[route.other])

    def _put_up(self, route: _Route, reader: int, microbatch: int, payload: Any) -> None:
        ready = self.ends.outgoing[route.channel].ready
        if route.exclusive:
            ready[microbatch] = payload
        else:
            ready.setdefault(microbatch, {})[reader] = payload


def _back(route: _Route) -> _Route:
    """The same way for gradients: the way back always has the next number."""
    return route._replace(channel=None if route.channel is None else route.channel + 1)
