"""The transport of a rehearsal: a `DistributedTransport` whose group, store and links are on virtual time.

What is real: the ledger of every channel, the exchange that ends a step, the watch that finds out who is to blame, and
what a rank does when it hears of that. What is not: bytes. A message carries a small value, and takes the time that the
links are said to take.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

from penstock.errors import PeerFailure
from penstock.runtime.transport.channel import Channel, ChannelEnds, Outgoing, QueuedIncoming, name_message
from penstock.runtime.transport.distributed.exchange import Exchange
from penstock.runtime.transport.distributed.member import Member
from penstock.runtime.transport.distributed.transfers import BackendTransfers
from penstock.runtime.transport.distributed.transport import CHANNELS, DistributedTransport
from penstock.runtime.transport.interrupts import uninterrupted
from penstock.tools.rehearsal.network import Backend, Network, Parcel, Store
from penstock.tools.rehearsal.virtual_time import RankClock

CONTROL = CHANNELS  # the number of the wires that carry exchanges, after those of channels

Posted = Callable[[int, int], None]  # told of each receive that is posted: its channel and microbatch


class Message(NamedTuple):
    """What is on a wire: a value or a failure, and for which step and microbatch it is."""

    step: int
    ordinal: int
    microbatch: int
    value: Any
    failure: PeerFailure | None


Stamp = Callable[[int, Message], Parcel]  # a message of a channel, with what its way takes


class RehearsalIncoming(QueuedIncoming[Message]):
    """The receiving end of a channel."""

    def __init__(
        self, channel: Channel, number: int, backend: Backend, transfers: BackendTransfers, posted: Posted
    ) -> None:
        super().__init__(channel)
        self._number = number
        self._wire = backend.recv((), channel.source_rank, number)
        self._transfers = transfers
        self._posted = posted

    @uninterrupted
    def post(self, microbatch: int) -> None:
        if microbatch in self.posted:
            raise self._posted_already(microbatch)
        self.due.append(microbatch)
        self._posted(self._number, microbatch)
        self.posted[microbatch] = None
        self.count += 1

    @uninterrupted
    def receive(self, microbatch: int) -> Any:
        message = self._take(microbatch)
        if message.failure is not None:
            raise copy(message.failure)
        return message.value

    def discard(self, microbatch: int) -> PeerFailure | None:
        return self._take(microbatch).failure

    def _next(self, expected: int, ordinal: int, wanted: int) -> Message:
        transfers, channel = self._transfers, self.channel
        if not self._wire.is_ready:
            transfers.wait(self._wire, channel.source_rank, channel, wanted)
        message: Message = self._wire.take()
        if message[:3] != (transfers.exchanges, ordinal, expected):
            due = name_message(expected, ordinal, transfers.exchanges)
            came = name_message(message.microbatch, message.ordinal, message.step)
            self._refuse(transfers.abort, expected, due, came)
        return message


class RehearsalOutgoing(Outgoing):
    """The sending end of a channel. A send never waits: the links buffer."""

    def __init__(self, channel: Channel, number: int, transfers: BackendTransfers, stamp: Stamp) -> None:
        super().__init__(channel)
        self._number = number
        self._transfers = transfers
        self._connection = transfers.connection(channel.target_rank)
        self._stamp = stamp

    @uninterrupted
    def send(self, microbatch: int) -> None:
        if microbatch not in self.ready:
            raise self._not_ready(microbatch)
        self._transfers.check_not_broken()
        self._put(Message(self._transfers.exchanges, self.count, microbatch, self.ready[microbatch], None))
        del self.ready[microbatch]
        self.count += 1

    def _send_failure(self, microbatch: int, failure: PeerFailure) -> None:
        self._put(Message(self._transfers.exchanges, self.count, microbatch, None, failure))

    def _put(self, message: Message) -> None:
        parcel: Any = self._stamp(self._number, message)  # A parcel stands in the place of a tensor.
        self._transfers.send(parcel, self._connection, self._number, self.channel, message.microbatch)


class Mail:
    """What ranks say in exchanges, in the place of the sockets between ranks of one host."""

    def __init__(self, network: Network, transfers: BackendTransfers) -> None:
        self._network, self._transfers = network, transfers

    def __contains__(self, peer: object) -> bool:
        return True

    def put_exchange(self, peer: int, step: int, body: bytes) -> None:
        parcel: Any = Parcel((step, body), 0.0, self._network.latency(self._transfers.rank, peer))
        self._transfers.send(parcel, self._transfers.connection(peer), CONTROL)

    def has_exchange(self, peer: int, step: int) -> bool:
        wire = self._network.wire(peer, self._transfers.rank, CONTROL)
        return wire.is_ready and wire.messages[0][1][0] == step

    def get_exchange(self, peer: int) -> tuple[int, bytes]:
        wire = self._network.wire(peer, self._transfers.rank, CONTROL)
        self._transfers.wait(wire, peer)
        step, body = wire.take()
        return step, body


class SharedReading(Exchange):
    """An exchange whose ranks are in one process: what all of them read is decoded once, and not by each of them.

    Ranks only look at the reports of others; so it does not matter that they look at the same ones. With a thousand
    ranks, each would else decode a thousand reports at the end of every step, a million of them in one thread.
    """

    def __init__(self, of: Exchange, network: Network) -> None:
        super().__init__(of.rank, of.ranks, CONTROL, of._transfers)
        self._read_before = network.read_before

    def _read(self, peer: int, content: bytes) -> Any:
        known = self._read_before.get(content)
        if known is None:
            known = super()._read(peer, content)
            while len(self._read_before) >= 4 * self.ranks:
                del self._read_before[next(iter(self._read_before))]
            self._read_before[content] = known
        return known


class RehearsalTransport(DistributedTransport):
    """One rank's transport on virtual time. `stamp` says what each message takes; `posted` hears of receives."""

    holds_interrupts = False

    def __init__(
        self,
        rank: int,
        ranks: int,
        network: Network,
        store: Store,
        timeout: float,
        stamp: Stamp,
        posted: Posted,
        clock: RankClock | None = None,
    ) -> None:
        self._stamp, self._posted = stamp, posted
        self._backend = Backend(network, rank)
        member = Member(rank, ranks, self._backend, {}, "virtual", store, store.host, 0, range(ranks))
        self._set_up(member, timeout, clock=clock or RankClock(network.time, rank))
        self._exchanger = SharedReading(self._exchanger, network)
        self._exchanger.sockets = Mail(network, self._transfers)

    def _make_ends(self, channels: tuple[Channel, ...], tag: int) -> ChannelEnds:
        def incoming(number: int, channel: Channel) -> RehearsalIncoming:
            return RehearsalIncoming(channel, number, self._backend, self._transfers, self._posted)

        def outgoing(number: int, channel: Channel) -> RehearsalOutgoing:
            return RehearsalOutgoing(channel, number, self._transfers, self._stamp)

        return ChannelEnds(channels, self.rank, incoming, outgoing)

    def describe_link(self, source: int, target: int) -> str:
        return "a link on virtual time"
