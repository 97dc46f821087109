"""The ends of channels between ranks on one host.

A message may be sent when fewer than `ahead` messages of its channel are under way beyond those whose receives are
posted. The receiver counts its posts in words that the sender can read, so that costs neither of them a call, and a
sender waits for nothing but posts: that is less than the proof of a program allows (there a send ends only when its
very receive is posted). Blocks never make a sender wait: where all are in use another is made, and where memory is
refused the message goes through torch.distributed, announced in its turn.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from penstock.errors import PeerFailure
from penstock.runtime.messages import plain
from penstock.runtime.transport.channel import Outgoing, QueuedIncoming, name_message
from penstock.runtime.transport.distributed.incoming import DistributedIncoming
from penstock.runtime.transport.distributed.outgoing import DistributedOutgoing
from penstock.runtime.transport.distributed.transfers import BackendTransfers
from penstock.runtime.transport.failure.blame import Waiting
from penstock.runtime.transport.failure.peer_failures import after_loss, failure_from
from penstock.runtime.transport.interrupts import uninterrupted
from penstock.runtime.transport.layout.layout import Layout, flatten
from penstock.runtime.transport.shared_memory import connection as pair
from penstock.runtime.transport.shared_memory.blocks import build_plain
from penstock.runtime.transport.shared_memory.connection import Connections, Filed, Gone

# A channel tries so many, those used last first, before it makes a new one.
RECENT_LAYOUTS = 16
_SENDER_WAITS = 0  # the first word: the sender sleeps until another receive is posted


class SharedIncoming(QueuedIncoming[Filed]):
    """The receiving end of a channel; `through_distributed` takes what comes through torch.distributed."""

    def __init__(
        self,
        through_distributed: DistributedIncoming,
        connections: Connections,
        transfers: BackendTransfers,
        number: int,
        channels_checksum: int,
        words: memoryview,
    ) -> None:
        super().__init__(through_distributed.channel)
        self._distributed = through_distributed
        self._connections, self._transfers = connections, transfers
        self._connection = connections[through_distributed.channel.source_rank]
        self._queue = self._connection.queues[channels_checksum << 16 | number]
        self._words, self._place = words, number + 1
        self._total = 0  # posted so far

    @uninterrupted
    def post(self, microbatch: int) -> None:
        if microbatch in self.posted:
            raise self._posted_already(microbatch)
        self._connections.busy_with = self.channel, microbatch
        self.due.append(microbatch)
        self._total += 1
        words = self._words
        words[self._place] = self._total
        if words[_SENDER_WAITS]:
            words[_SENDER_WAITS] = 0
            with suppress(Gone):  # Whoever waits for it will see.
                self._connection.say(pair.WAKE)
        self.posted[microbatch] = None
        self.count += 1

    @uninterrupted
    def receive(self, microbatch: int) -> Any:
        due = self.due
        if due and due[0] == microbatch:  # the next to come, as nearly always: nothing has to be kept for others
            filed = self._next(microbatch, self.count - len(due), microbatch)
            del self.posted[due.popleft()]
        else:
            filed = self._take(microbatch)
        kind, place, layout = filed[0], filed[1], filed[6]
        if layout is not None:
            return build_plain(layout) if place == pair.NO_BLOCK else self._connection.blocks[place].build(layout)
        if kind == pair.THROUGH_DISTRIBUTED:
            return self._distributed.receive(microbatch)
        raise self._failure(place)

    def discard(self, microbatch: int) -> PeerFailure | None:
        kind, place, *_ = self._take(microbatch)
        if kind == pair.THROUGH_DISTRIBUTED:
            return self._distributed.discard(microbatch)
        if kind == pair.DATA and place != pair.NO_BLOCK:
            self._connection.blocks[place].drop()
        return self._failure(place) if kind == pair.FAILURE else None

    def _failure(self, number: int) -> PeerFailure:
        return failure_from(self._connection.failures.pop(number), self._connection.peer)

    def _next(self, expected: int, ordinal: int, wanted: int) -> Filed:
        if not self._queue:
            self._connections.wait(self._connection, self.channel, wanted, self._queue.__len__)
        filed = self._queue.popleft()
        kind, _, step, its_ordinal, microbatch, checksum, layout = filed
        is_other = layout is not None and layout.checksum != checksum
        if microbatch != expected or its_ordinal != ordinal or step != self._transfers.exchanges or is_other:
            came = name_message(microbatch, its_ordinal, step)
            if layout is not None and is_other:
                came += f" in another layout (checksum {checksum:#x}, not {layout.checksum:#x})"
            due = name_message(expected, ordinal, self._transfers.exchanges)
            self._refuse(self._transfers.abort, expected, due, came)
        if kind == pair.THROUGH_DISTRIBUTED:
            self._distributed.post(expected)
        return filed

    def end_step(self) -> None:
        self.count = self._distributed.count = 0


class SharedOutgoing(Outgoing):
    """The sending end of a channel; `through_distributed` sends what must go through torch.distributed."""

    def __init__(
        self,
        through_distributed: DistributedOutgoing,
        connections: Connections,
        transfers: BackendTransfers,
        number: int,
        channels_checksum: int,
        ahead: int,
    ) -> None:
        super().__init__(through_distributed.channel)
        self._distributed = through_distributed
        self._connections, self._transfers = connections, transfers
        self._connection = connections[through_distributed.channel.target_rank]
        self._channels_checksum, self._key = channels_checksum, channels_checksum << 16 | number
        self._place = number + 1
        self._total = 0  # sent so far
        self._sent_through_distributed = 0  # Counted within a step.
        self._ahead = self._allowed = ahead
        self._recent: deque[tuple[int, Layout]] = deque(maxlen=RECENT_LAYOUTS)
        self._connection.kept.append(self._recent)

    @property
    def under_way(self) -> list[int]:
        return self._distributed.under_way

    @uninterrupted
    def send(self, microbatch: int) -> None:
        if microbatch not in self.ready:
            raise self._not_ready(microbatch)
        value, connection, step = self.ready[microbatch], self._connection, self._transfers.exchanges
        if self._transfers.watch.verdict is not None:
            raise after_loss(self._transfers.watch.verdict)
        self._connections.busy_with = self.channel, microbatch
        try:
            number, layout, leaves = self._match(value)
            if self._total >= self._allowed and not self._may_send():
                self._connections.wait(connection, self.channel, microbatch, self._may_send)
            kind, place = pair.DATA, pair.NO_BLOCK
            if layout.payload_bytes:
                block = connection.pool.put(layout, leaves, step) if layout.on_cpu else None
                if block is None:
                    self._send_through_distributed(microbatch, value)
                    kind = pair.THROUGH_DISTRIBUTED
                else:
                    place = block.number
            connection.write(
                pair.HEAD.pack(kind, place, self._key, step, self.count, microbatch, number, layout.checksum)
            )
        except Gone:
            self._connections.lose(Waiting(connection.peer, self.channel, microbatch, monotonic()))
        self._total += 1
        del self.ready[microbatch]
        self.count += 1

    def _send_failure(self, microbatch: int, failure: PeerFailure) -> None:
        connection, step = self._connection, self._transfers.exchanges
        self._connections.busy_with = self.channel, microbatch
        try:
            number = connection.write_note(pair.FAILURE_TEXT, plain.dumps(failure))
            connection.write(pair.HEAD.pack(pair.FAILURE, number, self._key, step, self.count, microbatch, 0, 0))
        except Gone:
            self._connections.lose(Waiting(connection.peer, self.channel, microbatch, monotonic()))
        self._total += 1

    def _send_through_distributed(self, microbatch: int, value: Any) -> None:
        pool = self._connection.pool
        if pool.refused is not None and not pool.warned:
            pool.warned = True
            warnings.warn(
                f"rank {self.channel.source_rank} gets no more shared memory for its link to rank "
                f"{self._connection.peer} ({pool.refused.strerror}, beyond {pool.nbytes / 2**20:.1f} MiB); what does "
                "not fit goes through torch.distributed, which is slower. Give the container more memory to avoid this",
                RuntimeWarning,
                stacklevel=2,
            )
        self._sent_through_distributed += 1
        self._distributed.ready[microbatch] = value
        self._distributed.send(microbatch)

    def _may_send(self) -> bool:
        """Return whether the receiver has posted enough; ask for a nudge if not."""
        words = self._connection.posts.get(self._channels_checksum)
        if words is None:
            return False  # It has yet to come.
        self._allowed = words[self._place] + self._ahead
        if self._total >= self._allowed:
            words[_SENDER_WAITS] = 1
            self._allowed = words[self._place] + self._ahead
        return self._total < self._allowed

    def _match(self, value: Any) -> tuple[int, Layout, Sequence[Any]]:
        """Return the layout of the value, known to the peer by a number, and the value's leaves."""
        recent = self._recent
        for known in recent:
            leaves = known[1].fits(value)
            if leaves is not None:
                if known is not recent[0]:
                    recent.remove(known)
                    recent.appendleft(known)
                return *known, leaves
        taken = flatten(value)
        known = self._connection.introduce(Layout.of(taken, False).all_packed())
        recent.appendleft(known)
        return *known, taken.items

    def flush(self) -> Sequence[int]:
        return self._distributed.flush() if self._sent_through_distributed else ()

    def end_step(self) -> None:
        self.count = 0
        with suppress(Gone):
            self._connection.pool.end_step(self._transfers.exchanges)
        if self._sent_through_distributed:
            self._sent_through_distributed = 0
            self._distributed.end_step()
