"""Where a stage finds what it needs and leaves what it made.

A stage never knows whether its neighbour is on another rank: values from other ranks are
taken off their channel, values from this rank were put into the box, detached and without a
copy. The turn of a V is therefore an ordinary hand-over. All routes are worked out once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.errors import PeerFailure, RunError
from penstock.runtime.transport import Channel, Transport
from penstock.runtime.transport.channel import Ends, Incoming, Outgoing
from penstock.runtime.transport.failure.interrupts import CTRL_C
from penstock.runtime.transport.handover import Rewritten, arrive, rewritten, share
from penstock.schedule import Link, Placement, Topology, links
from penstock.schedule.action import Action, Op


class _Route(NamedTuple):
    """One neighbour of a stage: how its value comes or goes."""

    other: int  # the stage at the other end
    channel: Any  # a number, or None: it lives on this rank
    readers: tuple[int, ...]  # the stages of the far rank that share one message
    alone: bool  # a message of its own, for nobody else


def channels_of(placement: Placement, topology: Topology) -> tuple[list[Channel], dict[tuple[int, int, str], int]]:
    """All channels of a pipeline, the same on every rank; and (stage, other end, direction) to their numbers."""
    channels: list[Channel] = []
    numbers: dict[tuple[int, int, str], int] = {}
    for link in links(placement, topology):
        there = Channel(link.source, link.target, "F", link.source_rank, link.target_rank)
        back = Channel(link.target, link.source, "B", link.target_rank, link.source_rank)
        for channel in (there, back):  # the way back always has the next number
            numbers[channel.source_stage, channel.target_stage, channel.direction] = len(channels)
            channels.append(channel)
    return channels, numbers


class Mailbox:
    """Values between the stages of one rank and their neighbours, here or on other ranks."""

    def __init__(self, rank: int, placement: Placement, topology: Topology, transport: Transport) -> None:
        self._transport = transport
        self._channels, self._numbers = channels_of(placement, topology)
        self.channels = tuple(self._channels)
        self.ends: Ends[Incoming, Outgoing] = Ends()
        self._values: dict[tuple[str, int, int, int], Any] = {}  # direction, to, from, microbatch
        self.waited_for: tuple[str, int] | None = None  # the receive that brought a failure, and from which rank
        crossing = links(placement, topology)
        self._inputs: dict[int, list[_Route]] = {}
        self._outputs: dict[int, list[_Route]] = {}
        for stage in placement.stages_of(rank):
            self._inputs[stage] = [self._route(crossing, source, stage, "in") for source in topology.producers(stage)]
            self._outputs[stage] = [self._route(crossing, stage, target, "out") for target in topology.consumers(stage)]

    def _route(self, crossing: tuple[Link, ...], source: int, target: int, way: str) -> _Route:
        other = source if way == "in" else target
        for link in crossing:
            if link.source == source and target in link.targets:
                return _Route(other, self._numbers[link.source, link.target, "F"], link.targets, len(link.targets) == 1)
        return _Route(other, None, (target,), False)

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
        self._values.clear()
        for end in self.ends.outgoing.values():
            end.ready.clear()
        self.waited_for = None

    def _receive(self, channel: int, microbatch: int) -> Any:
        edge = self.channels[channel]
        try:
            value = self.ends.incoming[channel].receive(microbatch)
        except PeerFailure:
            self.waited_for = edge.receive_action(microbatch), edge.source_rank
            raise
        except Rewritten:
            raise rewritten(edge.source_stage, microbatch) from None
        if CTRL_C.since:
            CTRL_C.look()
        return value

    # -- forward

    def take_inputs(self, stage: int, microbatch: int) -> dict[int, Any]:
        """The payload from each producing stage; waits where it is still on its way."""
        routes = self._inputs[stage]
        if len(routes) == 1 and (route := routes[0]).alone:  # as in any chain of stages
            return {route.other: self._receive(route.channel, microbatch)}
        return {route.other: self._take("F", stage, route, microbatch) for route in routes}

    def put_outputs(self, stage: int, microbatch: int, emitted: Mapping[int, Any]) -> None:
        """Hand over what stays on this rank; put up the rest for its SEND."""
        for route in self._outputs[stage]:
            payload = emitted[route.other]
            if route.channel is None:
                self._values["F", route.other, stage, microbatch] = share(payload)
            else:
                self._put_up(route.channel, route, route.other, microbatch, payload)

    # -- backward

    def take_gradients(self, stage: int, microbatch: int) -> dict[int, Any]:
        """The gradients from each consuming stage."""
        routes = self._outputs[stage]
        if len(routes) == 1 and (route := routes[0]).alone:
            return {route.other: self._receive(route.channel + 1, microbatch)}
        return {route.other: self._take_back(stage, route, microbatch) for route in routes}

    def put_gradients(self, stage: int, microbatch: int, back: Mapping[int, Any]) -> None:
        """Give each producing stage the gradients of what it sent."""
        for route in self._inputs[stage]:
            if route.channel is None:
                self._values["B", route.other, stage, microbatch] = back[route.other]
            else:
                self._put_up(route.channel + 1, route, stage, microbatch, back[route.other])

    # -- one message may be for, or from, several stages of a rank

    def _put_up(self, channel: int, route: _Route, reader: int, microbatch: int, payload: Any) -> None:
        ready = self.ends.outgoing[channel].ready
        if route.alone:
            ready[microbatch] = payload
        else:
            ready.setdefault(microbatch, {})[reader] = payload

    def _take(self, direction: str, stage: int, route: _Route, microbatch: int) -> Any:
        if route.channel is not None:
            if route.alone:
                return self._receive(route.channel, microbatch)
            if (direction, stage, route.other, microbatch) not in self._values:
                for reader, payload in self._receive(route.channel, microbatch).items():
                    self._values[direction, reader, route.other, microbatch] = payload
            return self._pop(direction, stage, route.other, microbatch)
        try:
            value, ready = self._pop(direction, stage, route.other, microbatch)
            return arrive(value, ready, None)
        except Rewritten:
            raise rewritten(route.other, microbatch) from None

    def _take_back(self, stage: int, route: _Route, microbatch: int) -> Any:
        if route.channel is not None:
            if route.alone:
                return self._receive(route.channel + 1, microbatch)
            if ("B", stage, route.other, microbatch) not in self._values:
                for reader, payload in self._receive(route.channel + 1, microbatch).items():
                    self._values["B", stage, reader, microbatch] = payload
        return self._pop("B", stage, route.other, microbatch)

    def _pop(self, direction: str, to: int, source: int, microbatch: int) -> Any:
        try:
            return self._values.pop((direction, to, source, microbatch))
        except KeyError:
            what = "output" if direction == "F" else "gradient"
            raise RunError(
                f"stage {to} needs the {what} of stage {source} for microbatch {microbatch}, which is not there"
            ) from None
