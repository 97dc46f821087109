"""Ranks are processes on one host: values travel through shared memory, and a Unix socket rings the bell.

Through gloo's loopback a small message costs more than a hundred microseconds, most of it in threads that wake each
other, and a large one is copied four times. Here a value is copied once, into a block of shared memory (`blocks`), one
packet of 40 bytes tells of it (`connection`), and the receiver computes on the block itself. The packet says which
step, channel, microbatch and layout it is, so every check of the other transports is made here too; and since it comes
before the receiver needs to know a size, nothing has to be predicted.

This is a `DistributedTransport` for all else: ranks on other hosts and tensors on other devices, link by link; the
exchange that ends a step; and the watch. A message for which no memory is to be had takes that way too, announced in
its turn, so a link that runs out of memory goes on, only slower. Nothing here outlives the processes: neither the
memory nor the sockets have a name (`own_socket`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from penstock.errors import PeerFailure, UsageError
from penstock.runtime.transport.channel import Channel, ChannelEnds, Incoming, Outgoing, channels_checksum
from penstock.runtime.transport.distributed.exchange import COORDINATOR
from penstock.runtime.transport.distributed.transport import DistributedTransport
from penstock.runtime.transport.failure.blame import Waiting
from penstock.runtime.transport.failure.peer_failures import after_loss
from penstock.runtime.transport.failure.watch import Watch
from penstock.runtime.transport.shared_memory.connection import Connection, Connections
from penstock.runtime.transport.shared_memory.ends import SharedIncoming, SharedOutgoing
from penstock.runtime.transport.shared_memory.meeting import Meeting, missing_here

AHEAD = 8  # messages of a channel that may be sent before their receives are posted
ANY_NUMBER = 1 << 62


class SharedMemoryTransport(DistributedTransport):
    """One rank's transport through shared memory, and through torch.distributed for all else.

    With `strict`, a link that cannot use shared memory is an error.
    """

    max_sends = AHEAD

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
        *,
        device: torch.device | str | None = None,
        strict: bool = False,
    ) -> None:
        if strict and (missing := missing_here()) is not None:
            raise UsageError(f"transport='shared' does not work here: {missing}; leave transport= out")
        super().__init__(group, timeout, device=device)
        self._strict = strict
        self._connections = Connections(self.rank, self.watch)
        self._exchanger.sockets = self._connections
        home = "cpu" if self.device is None else self.device.type
        try:
            self._meeting = Meeting(
                self._store,
                f"{self._prefix}/shared",
                self.rank,
                self.ranks,
                home,
                partial(_wait_to_meet, self.watch),  # not of this transport, which its own end would then keep alive
            )
        except dist.DistError as error:
            raise self.watch.without_store(error) from error
        self._apart: dict[int, str] = {}  # near ranks that cannot be reached, and why
        weakref.finalize(self, _hang_up, self._meeting, self._connections)

    # -- connecting to ranks on this host

    def _connect(self, channels: tuple[Channel, ...]) -> None:
        """Connect to every rank on this host that a channel, or the exchange, joins with this one."""
        ends = [{channel.source_rank, channel.target_rank} for channel in channels]
        mine = {rank for pair in ends if self.rank in pair for rank in pair}
        mine |= {COORDINATOR} if self.rank != COORDINATOR else set(range(self.ranks))
        with self._meeting_others():
            for rank in range(self.ranks):
                self._meeting.address_of(rank)
            for peer in sorted(mine - {self.rank} - self._connections.keys() - self._apart.keys()):
                self._join(peer)

    @contextmanager
    def _meeting_others(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise self.watch.without_store(error) from error
        finally:
            self.watch.waiting = None
            self._meeting.rest()

    def _make_ends(self, channels: tuple[Channel, ...], tag: int) -> ChannelEnds:
        self._connect(channels)
        self._links.connect(channels, without=self._connections)
        checksum = channels_checksum(channels)
        words: dict[int, memoryview] = {}  # Indexed by peer.
        shared = self._connections, self._transfers

        def incoming(number: int, channel: Channel) -> Incoming:
            end, peer = self._make_incoming(tag, number, channel), channel.source_rank
            if peer not in self._connections:
                return end
            if peer not in words:
                words[peer] = self._connections[peer].share_posts(checksum, len(channels) + 1)
            return SharedIncoming(end, *shared, number, checksum, words[peer])

        def outgoing(number: int, channel: Channel) -> Outgoing:
            if channel.target_rank not in self._connections:
                return self._make_outgoing(tag, self.max_sends, number, channel)
            # The receive of a message that takes that way is posted where it is announced: no send may wait.
            end = self._make_outgoing(tag, ANY_NUMBER, number, channel)
            return SharedOutgoing(end, *shared, number, checksum, self.max_sends)

        return ChannelEnds(channels, self.rank, incoming, outgoing)

    def _join(self, peer: int) -> None:
        reason = self._meeting.mine.apart(self._meeting.address_of(peer))
        found = self._meeting.join(peer) if reason is None else reason
        if not isinstance(found, str):
            self._connections[peer] = Connection(peer, found, self._connections.wait_for_room)
            return
        self._apart[peer] = found
        if self._strict:
            text = f"transport='shared', but ranks {self.rank} and {peer} are {found}; leave transport= out"
            self.abort(PeerFailure(self.rank, text))
            raise UsageError(text)

    def describe_link(self, source: int, target: int) -> str:
        other = target if source == self.rank else source
        with self._meeting_others():
            reason = self._meeting.address_of(source).apart(self._meeting.address_of(target))
        if self.rank in (source, target) and reason is None:
            reason = self._apart.get(other)
            refused = self._connections[other].pool.refused if other in self._connections else None
            if refused is not None and source == self.rank:
                reason = f"shared memory was refused: {refused.strerror}"
        return "shared memory" if reason is None else f"{super().describe_link(source, target)}, {reason}"

    def close(self) -> None:
        super().close()
        _hang_up(self._meeting, self._connections)


def _wait_to_meet(watch: Watch, peer: int, since: float) -> None:
    watch.waiting = Waiting(peer, None, -1, since, "for it to connect through shared memory")
    if watch.verdict is not None:
        raise after_loss(watch.verdict)


def _hang_up(meeting: Meeting, connections: Connections) -> None:
    meeting.close()
    connections.close()
