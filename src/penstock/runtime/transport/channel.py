"""Channels between stages, and the ledger that each end of one keeps.

A channel is a directed edge between two stages for one direction of traffic. The k-th message that is sent on it
belongs to the k-th receive that is posted on it, and every message says which step and microbatch it is for, so a
mistaken order is an error (`MessageError`) and never a swapped tensor. Different channels never hold each other up.

An `Incoming` end knows which receives are posted, an `Outgoing` one what waits to be sent. How bytes move is up to the
classes below them: one pair per way that there is. The executor calls `post` and `send` of the ends themselves, and the
mailbox `receive`.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Literal, NoReturn, TypeVar

from penstock.errors import MessageError, PeerFailure, RunError, UsageError
from penstock.runtime.messages import plain
from penstock.schedule import Link, Placement, Topology, links


@dataclass(frozen=True, slots=True)
class Channel:
    """One way of values between two ranks, for one kind of traffic: mostly from a stage to the next one.

    Tied parameters and carried tensors have channels too; the number of their group stands in the place of the stages.
    """

    source_stage: int
    target_stage: int
    direction: Literal["F", "B"]
    source_rank: int
    target_rank: int

    def __str__(self) -> str:
        return f"{self.direction} of stage {self.source_stage} to {self.target_stage}"

    def send_action(self, microbatch: int) -> str:
        """Return the action that sends on this channel, in the notation of schedules."""
        return f"{self.source_stage}SEND_{self.direction}{microbatch}"

    def receive_action(self, microbatch: int) -> str:
        """Return the action that receives from this channel, in the notation of schedules."""
        return f"{self.target_stage}RECV_{self.direction}{microbatch}"


plain.register(Channel, source_stage=int, target_stage=int, direction=str, source_rank=int, target_rank=int)


class Incoming(ABC):
    """The receiving end of a channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.posted: dict[int, Any] = {}  # By microbatch, in the order of posting: what is known of its message.
        self.count = 0  # receives posted in this step

    def expect(self, receives: int) -> None:  # noqa: B027 (most have nothing to do)
        """Expect so many receives in the step that begins, each of which will be received or discarded."""

    @abstractmethod
    def post(self, microbatch: int) -> None:
        """Run a RECV action: make ready for the next message, and keep the books (`posted`, `count`). Never blocks."""

    def _posted_already(self, microbatch: int) -> UsageError:
        return UsageError(f"{self.channel.receive_action(microbatch)} is posted already")

    @abstractmethod
    def receive(self, microbatch: int) -> Any:
        """Wait for the message, check that it is the due one, and return its value.

        Posts the receive first where that has not been done. Tensors are leaves, with `requires_grad` as it was at the
        sender. Raises the sender's `PeerFailure` where the sender had nothing but that to send.
        """

    @abstractmethod
    def discard(self, microbatch: int) -> PeerFailure | None:
        """Take the message off the wire, posted or not, and drop it; returns the failure if it was one."""

    def _refuse(self, abort: Callable[[PeerFailure], None], microbatch: int, due: str, came: str) -> NoReturn:
        """Refuse a message that is not the due one: the two ranks disagree about the program, and the group ends."""
        channel = self.channel
        error = MessageError(
            f"rank {channel.target_rank} was due {due} on channel {channel} from rank {channel.source_rank}, "
            f"but {came} came; both ranks must run the same program"
        )
        cause = f"MessageError: {error}"
        abort(PeerFailure(channel.target_rank, cause, stage=channel.target_stage, microbatch=microbatch))
        raise error

    def end_step(self) -> None:
        self.count = 0


def name_message(microbatch: int, ordinal: int, exchanges: int) -> str:
    """Describe which message of a channel this is: its number since the last exchange, and how many there were."""
    return f"microbatch {microbatch}, number {ordinal} after {exchanges} exchanges"


Message = TypeVar("Message")


class QueuedIncoming(Incoming, Generic[Message]):
    """A receiving end to which messages come one after the other, whoever asks for which of them first."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self.due: deque[int] = deque()  # microbatches posted whose messages have not come

    def _take(self, microbatch: int) -> Message:
        """Return the message that the receive of this microbatch was posted for; those that come before it are kept."""
        posted, due = self.posted, self.due
        if microbatch not in posted:
            self.post(microbatch)
        while posted[microbatch] is None:
            posted[due[0]] = self._next(due[0], self.count - len(due), microbatch)
            due.popleft()
        message: Message = posted.pop(microbatch)
        return message

    @abstractmethod
    def _next(self, expected: int, ordinal: int, wanted: int) -> Message:
        """Wait for the next message, which must be number `ordinal` of the step and for microbatch `expected`.

        A wait that is ended by Ctrl-C has taken nothing. `wanted` is the microbatch that somebody waits for.
        """


class Outgoing(ABC):
    """The sending end of a channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.ready: dict[int, Any] = {}  # By microbatch: values to be sent.
        self.count = 0  # messages sent in this step

    @abstractmethod
    def send(self, microbatch: int) -> None:
        """Run a SEND action: the value that is ready for it leaves, and must not be changed in place after.

        It is any pytree of tensors, `None` and plain values. Keeps the books (`ready`, `count`).
        """

    def _not_ready(self, microbatch: int) -> RunError:
        self.ready[microbatch] = None  # It is still owed.
        action = self.channel.send_action(microbatch)
        return RunError(f"{action}: nothing is ready to be sent; has a handler left out its compute?")

    @property
    def under_way(self) -> Sequence[int]:
        """Microbatches that were sent and whose memory is still read; none where a send copies, or hands over."""
        return ()

    def send_failure(self, microbatch: int, failure: PeerFailure) -> None:
        """Send, in the place of that message, the reason why there is none."""
        self.ready.pop(microbatch, None)
        self._send_failure(microbatch, failure)
        self.count += 1

    @abstractmethod
    def _send_failure(self, microbatch: int, failure: PeerFailure) -> None:
        """Send the bytes of the failure in the place of the message."""

    def flush(self) -> Sequence[int]:
        """Wait until all that was sent has left; microbatches that were written to before they had."""
        return ()

    def end_step(self) -> None:
        self.count = 0


def channels_checksum(channels: Sequence[Channel]) -> int:
    """Compute a number that stands for all channels of a program, the same on every rank."""
    return zlib.crc32(repr(channels).encode())


class ChannelEnds:
    """The ends of one program's channels that live on one rank, by the number of their channel.

    Each is made from the number of its channel and the channel; without channels, nothing makes any.
    """

    def __init__(
        self, channels: Sequence[Channel] = (), rank: int = 0, make_incoming: Any = None, make_outgoing: Any = None
    ) -> None:
        self.channels, self.rank = channels, rank
        self.channels_checksum = channels_checksum(channels)
        self.incoming: dict[int, Incoming] = {}
        self.outgoing: dict[int, Outgoing] = {}
        for number, channel in enumerate(channels):
            if channel.target_rank == rank:
                self.incoming[number] = make_incoming(number, channel)
            elif channel.source_rank == rank:
                self.outgoing[number] = make_outgoing(number, channel)

    def receiving(self, channel_number: int) -> Incoming:
        if channel_number not in self.incoming:
            raise self._missing(channel_number, "receive")
        return self.incoming[channel_number]

    def sending(self, channel_number: int) -> Outgoing:
        if channel_number not in self.outgoing:
            raise self._missing(channel_number, "send")
        return self.outgoing[channel_number]

    def _missing(self, channel_number: int, wanted: str) -> UsageError:
        if not 0 <= channel_number < len(self.channels):
            return UsageError(f"channel {channel_number} is not open; {len(self.channels)} are")
        channel = self.channels[channel_number]
        return UsageError(
            f"rank {self.rank} cannot {wanted} on channel {channel_number} ({channel}), which goes from rank "
            f"{channel.source_rank} to {channel.target_rank}"
        )

    @property
    def pending(self) -> list[tuple[int, int]]:
        """Return the receives under way, as channel and microbatch."""
        return [(number, microbatch) for number, end in self.incoming.items() for microbatch in end.posted]

    @property
    def under_way(self) -> list[tuple[int, int]]:
        """Return the sends under way, as channel and microbatch."""
        return [(number, microbatch) for number, end in self.outgoing.items() for microbatch in end.under_way]

    def counts(self) -> dict[int, int]:
        """Return how many messages of each channel this rank has sent, or has taken, in this step."""
        moved = {index: end.count for index, end in self.outgoing.items() if end.count}
        for index, end in self.incoming.items():
            if end.count:
                moved[index] = end.count - len(end.posted)
        return moved

    def awaited(self, channel: Channel, microbatch: int) -> tuple[int, int] | None:
        """Return the channel's number, and which of its messages in this step, from 0, that microbatch's is."""
        for index, end in self.incoming.items():
            if end.channel == channel and microbatch in (posted := tuple(end.posted)):
                return index, end.count - len(posted) + posted.index(microbatch)
        return None

    def end_step(self) -> None:
        for incoming in self.incoming.values():
            incoming.end_step()
        for outgoing in self.outgoing.values():
            outgoing.end_step()

    def check_idle(self, call: str) -> None:
        """Check that nothing is posted where other channels are opened: a posted receive cannot be taken back."""
        for end in self.incoming.values():
            if end.posted:
                waiting = ", ".join(map(end.channel.receive_action, end.posted))
                raise UsageError(f"{call} while {waiting} is posted; receive or discard it first")


def check_channels(channels: Sequence[Channel], ranks: int) -> tuple[Channel, ...]:
    """Refuse channels that no transport can serve."""
    for index, channel in enumerate(channels):
        ends = (channel.source_rank, channel.target_rank)
        if not all(0 <= end < ranks for end in ends):
            raise UsageError(f"channel {index} ({channel}) joins ranks {ends}, but there are {ranks} ranks")
        if channel.source_rank == channel.target_rank:
            raise UsageError(f"channel {index} ({channel}) stays on rank {ends[0]}; that is a hand-over, not a send")
    if len(set(channels)) != len(channels):
        raise UsageError("the same channel is listed twice; each (stage, stage, direction) has one")
    return tuple(channels)


@lru_cache(maxsize=8)  # the ranks of one process ask for the same
def channels_of(
    placement: Placement, topology: Topology
) -> tuple[tuple[Channel, ...], Mapping[tuple[int, int, str], int], tuple[Link, ...]]:
    """Return all channels, the same on every rank, their numbers by (stage, other end, direction), and the links."""
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
