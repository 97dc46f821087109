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
from penstock.runtime.transport.failure.interrupts import CTRL_C
from penstock.runtime.transport.handover import Rewritten, arrive, rewritten, share
from penstock.schedule import Link, Placement, Topology, links
from penstock.schedule.action import Action, Op

__all__ = ["Mailbox", "channels_of"]


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
        for channel in (there, back):
            numbers[channel.source_stage, channel.target_stage, channel.direction] = len(channels)
            channels.append(channel)
    return channels, numbers


class Mailbox:
    """The boxes of one rank."""

    def __init__(self, rank: int, placement: Placement, topology: Topology, transport: Transport) -> None:
        self._transport = transport
        self._channels, self._numbers = channels_of(placement, topology)
        self.channels = tuple(self._channels)
        self._values: dict[tuple[str, int, int, int], Any] = {}  # direction, to, from, microbatch
        self._out: dict[tuple[int, int], Any] = {}  # channel, microbatch
        self.pending: dict[tuple[int, int], None] = {}  # posted and not yet taken, in order
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

    def open(self) -> None:
        """Tell the transport which channels this pipeline has."""
        self._transport.open(self.channels)

    def clear(self) -> None:
        """Drop everything, as after a failed step."""
        self._values.clear()
        self._out.clear()
        self.pending.clear()
        self.waited_for = None

    # -- transfers

    def post(self, channel: int, microbatch: int) -> None:
        """RECV: make ready for a message."""
        CTRL_C.held = True
        self.pending[channel, microbatch] = None
        self._transport.post(channel, microbatch)
        CTRL_C.release()

    def send(self, channel: int, microbatch: int) -> None:
        """SEND: what was put up for this message leaves."""
        key = channel, microbatch
        if key not in self._out:
            self._out[key] = None  # still owed
            action = self.channels[channel].send_action(microbatch)
            raise RunError(f"{action}: nothing was put up to be sent; has a handler left out its compute?")
        CTRL_C.held = True
        self._transport.send(channel, microbatch, self._out[key])
        del self._out[key]
        CTRL_C.release()

    def owes(self, channel: int, microbatch: int) -> bool:
        """Whether what was put up for this message has yet to leave."""
        return (channel, microbatch) in self._out

    def _receive(self, channel: int, microbatch: int) -> Any:
        CTRL_C.held = True
        key = channel, microbatch
        came = True
        try:
            return self._transport.receive(channel, microbatch)
        except KeyboardInterrupt:
            came = not self._transport.awaits(channel, microbatch)
            raise
        except PeerFailure:
            self.waited_for = self.channels[channel].receive_action(microbatch), self.channels[channel].source_rank
            raise
        except Rewritten:
            raise rewritten(self.channels[channel].source_stage, microbatch) from None
        finally:
            if came:  # also where what came is a failure, it has come
                self.pending.pop(key, None)
            CTRL_C.release()

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
        if route.alone:
            self._out[channel, microbatch] = payload
        else:
            self._out.setdefault((channel, microbatch), {})[reader] = payload

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
                f"stage {to} wants the {what} of stage {source}, microbatch {microbatch}: not there"
            ) from None
