"""Ranks are processes on one host: values travel through shared memory, and a Unix socket rings the bell.

Through gloo's loopback a small message costs more than a hundred microseconds, most of it in threads that
wake each other, and a large one is copied four times. Here a value is copied once, into a block of shared
memory (`blocks`), one packet of 40 bytes tells of it (`connection`), and the receiver computes on the block itself.
The packet says which step, channel, microbatch and layout it is, so every check of the other transports is
made here too; and since it comes before the receiver needs to know a size, nothing has to be predicted.

This is a `DistributedTransport` for all else: ranks on other hosts and tensors on other devices, link by
link; the exchange that ends a step; and the question who is to blame (`watch`), where a socket that closes
without a goodbye is what gloo's closed connection is there. A message for which no memory is to be had takes
that way too, announced in its turn, so a link that runs out of memory goes on, only slower.

Nothing here outlives the processes: neither the memory nor the sockets have a name (`own_socket`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from penstock.errors import PeerFailure, UsageError
from penstock.messages import plain
from penstock.runtime.transport.base import Channel, after_loss, failure_from, wrong_message
from penstock.runtime.transport.failure.bell import Bell
from penstock.runtime.transport.failure.blame import Waiting
from penstock.runtime.transport.failure.watch import Watch
from penstock.runtime.transport.gloo.links import Links
from penstock.runtime.transport.gloo.outbox import Outbox
from penstock.runtime.transport.gloo.transport import CONTROL_TAG, DistributedTransport
from penstock.runtime.transport.shared_memory.blocks import USED, build_plain
from penstock.runtime.transport.shared_memory.channel import NearIn, NearLinks, NearOut
from penstock.runtime.transport.shared_memory.connection import DATA, FAILURE, FAR, HEAD, NO_BLOCK, Filed, Gone, Pair
from penstock.runtime.transport.shared_memory.connections import Pairs
from penstock.runtime.transport.shared_memory.exchange import NearExchange
from penstock.runtime.transport.shared_memory.meeting import Meeting, missing_here

__all__ = ["SharedMemoryTransport"]

AHEAD = 8  # messages of a channel that may be sent before their receives are posted
ANY_NUMBER = 1 << 62


class SharedMemoryTransport(DistributedTransport):
    """One rank's end. With `strict`, a link that cannot use shared memory is an error."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
        *,
        max_sends: int = AHEAD,
        coordinator: int = 0,
        device: torch.device | str | None = None,
        strict: bool = False,
    ) -> None:
        if strict and (missing := missing_here()) is not None:
            raise UsageError(f"transport='shared' does not work here: {missing}; leave transport= out")
        super().__init__(group, timeout, max_sends=max_sends, coordinator=coordinator, device=device)
        self._strict = strict
        self._ahead = max_sends
        home = "cpu" if self.device is None else self.device.type
        self._meeting = Meeting(
            self._store,
            f"{self._prefix}/shared",
            self.rank,
            self.ranks,
            self._bell.address,
            home,
            partial(_wait_to_meet, self._watch),  # not of this transport, which its own end would then keep alive
        )
        self._bell.others = self._meeting.neighbours
        self._pairs = Pairs(self.rank, self._watch)
        self._exchanger = NearExchange(
            self.rank, self.ranks, coordinator, self._tag + CONTROL_TAG, self._operations, self._pairs
        )
        self._apart: dict[int, str] = {}  # near ranks that cannot be reached, and why
        self._ins: dict[int, NearIn] = {}
        self._outs: dict[int, NearOut] = {}
        # Gloo's receive of a message that takes the long way is posted where its bell is read: no send may wait for it.
        self._detour = Outbox(self._operations, self._book, self.device, ANY_NUMBER)
        weakref.finalize(self, _hang_up, self._meeting, self._pairs, self._bell)

    def _make_bell(self) -> Bell:
        self._bell = Bell()
        return self._bell

    # -- laying links

    def _lay(self, channels: tuple[Channel, ...], tag: int) -> Links:
        ends = [(edge.source_rank, edge.target_rank) for edge in channels]
        centre = self._exchanger.coordinator  # the exchange goes through it
        ends += [(rank, centre) for rank in range(self.ranks) if rank != centre]
        mine = {end for pair in ends if self.rank in pair for end in pair} - {self.rank}
        try:
            for rank in range(self.ranks):
                self._meeting.place(rank)
            for peer in sorted(mine - self._pairs.keys() - self._apart.keys()):
                self._join(peer)
        except dist.DistError as error:
            raise self._watch.without_store(error) from error
        finally:
            self._watch.waiting = None
            self._meeting.rest()
        return NearLinks(channels, self.rank, tag, self._pairs, self._ahead)

    def _join(self, peer: int) -> None:
        reason = self._meeting.mine.apart(self._meeting.place(peer))
        found = self._meeting.join(peer) if reason is None else reason
        if not isinstance(found, str):
            self._pairs[peer] = Pair(peer, found, self._pairs.wait_for_room)
            return
        self._apart[peer] = found
        if self._strict:
            text = f"transport='shared', but ranks {self.rank} and {peer} are {found}; leave transport= out"
            self.abort(PeerFailure(self.rank, text))
            raise UsageError(text)

    def open(self, channels: Sequence[Channel]) -> None:
        super().open(channels)
        if isinstance(self._links, NearLinks):
            self._ins, self._outs = self._links.near_ins, self._links.near_outs

    def wire(self, source: int, target: int) -> str:
        """What carries values from one rank to another, in words."""
        other = target if source == self.rank else source
        reason = self._meeting.place(source).apart(self._meeting.place(target))
        if self.rank in (source, target) and reason is None:
            reason = self._apart.get(other)
            pair = self._pairs.get(other)
            if pair is not None and pair.ring.refused is not None and source == self.rank:
                reason = f"shared memory was refused: {pair.ring.refused.strerror}"
        self._meeting.rest()
        return "shared memory" if reason is None else f"{super().wire(source, target)}, {reason}"

    # -- sending

    def send(self, channel: int, microbatch: int, value: Any) -> None:
        if self._watch.verdict is not None:
            self._check_whole()
        link = self._outs.get(channel)
        if link is None:
            super().send(channel, microbatch, value)
            return
        self._pairs.busy_with = link.edge, microbatch
        pair, step = link.pair, self._operations.step
        try:
            number, layout, leaves = link.match(value)
            if link.total >= link.allowed and not link.may_send():
                self._pairs.wait(pair, link.edge, microbatch, link.may_send)
            kind, place = DATA, NO_BLOCK
            if layout.payload_bytes:
                block = pair.ring.take(layout.frame_bytes, step) if layout.on_cpu else None
                if block is None:
                    self._send_far(channel, link, microbatch, value)
                    kind = FAR
                else:
                    block.pack(layout, leaves)
                    block.words[0] = USED
                    place = block.number
            pair.write(HEAD.pack(kind, place, link.key, step, link.count, microbatch, number, layout.checksum))
        except Gone:
            self._pairs.lose(Waiting(pair.peer, link.edge, microbatch, monotonic()))
        link.count += 1
        link.total += 1

    def _send_far(self, channel: int, link: NearOut, microbatch: int, value: Any) -> None:
        ring = link.pair.ring
        if ring.refused is not None and not ring.told:
            ring.told = True
            warnings.warn(
                f"rank {self.rank} gets no more shared memory for its link to rank {link.pair.peer} "
                f"({ring.refused.strerror}, beyond {ring.nbytes / 2**20:.1f} MiB); what does not fit goes through "
                "torch.distributed, which is slower. Give the container more memory to avoid this",
                RuntimeWarning,
                stacklevel=2,
            )
        self._detour.send(self._links.outs[channel], microbatch, value)

    def send_failure(self, channel: int, microbatch: int, failure: PeerFailure) -> None:
        link = self._outs.get(channel)
        if link is None:
            super().send_failure(channel, microbatch, failure)
        elif self.broken is None:
            self._pairs.busy_with = link.edge, microbatch
            try:
                number = link.pair.write_failure(plain.dumps(failure))
                step = self._operations.step
                link.pair.write(HEAD.pack(FAILURE, number, link.key, step, link.count, microbatch, 0, 0))
            except Gone:
                self._pairs.lose(Waiting(link.pair.peer, link.edge, microbatch, monotonic()))
            link.count += 1
            link.total += 1

    # -- receiving

    def post(self, channel: int, microbatch: int) -> None:
        link = self._ins.get(channel)
        if link is None:
            super().post(channel, microbatch)
            return
        if microbatch in link.due or microbatch in link.came:
            raise UsageError(f"{link.edge.receive_action(microbatch)} is posted already")
        self._pairs.busy_with = link.edge, microbatch
        with suppress(Gone):  # whoever waits for it will see
            link.post(microbatch)

    def receive(self, channel: int, microbatch: int) -> Any:
        link = self._ins.get(channel)
        if link is None:
            return super().receive(channel, microbatch)
        (kind, place, *_), layout = self._take(channel, link, microbatch)
        if layout is not None:
            return build_plain(layout) if place == NO_BLOCK else link.pair.blocks[place].build(layout)
        if kind == FAR:
            return self._inbox.take(self._links.ins[channel], microbatch)
        raise failure_from(link.pair.failures.pop(place), link.pair.peer)

    def awaits(self, channel: int, microbatch: int) -> bool:
        link = self._ins.get(channel)
        return link is not None and (microbatch in link.due or microbatch in link.came)

    def discard(self, channel: int, microbatch: int) -> PeerFailure | None:
        if self.broken is not None:
            return self.broken
        link = self._ins.get(channel)
        if link is None:
            return super().discard(channel, microbatch)
        (kind, place, *_), _ = self._take(channel, link, microbatch)
        if kind == FAR:
            return self._inbox.drop(self._links.ins[channel], microbatch)
        if kind == DATA and place != NO_BLOCK:
            link.pair.blocks[place].drop()
        return failure_from(link.pair.failures.pop(place), link.pair.peer) if kind == FAILURE else None

    def _take(self, channel: int, link: NearIn, microbatch: int) -> Filed:
        """The bell of the message that the receive of this microbatch was posted for."""
        came = link.came
        if came and microbatch in came:
            return came.pop(microbatch)
        due, queue = link.due, link.queue
        if microbatch not in due:
            self.post(channel, microbatch)
        while True:
            if not queue:
                self._pairs.wait(link.pair, link.edge, microbatch, queue.__len__)
            filed = queue.popleft()
            fields, layout = filed
            expected = due[0]
            if (
                fields[5] != expected
                or fields[4] != link.count
                or fields[3] != self._operations.step
                or (layout is not None and layout.checksum != fields[7])
            ):
                self._refuse(link, expected, filed)
            if fields[0] == FAR:
                self._inbox.post(self._links.ins[channel], expected)
            due.popleft()
            link.count += 1
            if expected == microbatch:
                return filed
            came[expected] = filed

    def _refuse(self, link: NearIn, expected: int, filed: Filed) -> NoReturn:
        fields, layout = filed
        due = f"microbatch {expected}, number {link.count} of step {self._operations.step}"
        text = f"microbatch {fields[5]}, number {fields[4]} of step {fields[3]}"
        if layout is not None and layout.checksum != fields[7]:
            text += f" in another layout (checksum {fields[7]:#x}, not {layout.checksum:#x})"
        error = wrong_message(link.edge, due, text)
        self.abort(PeerFailure(self.rank, f"MessageError: {error}", stage=link.edge.target_stage))
        raise error

    # -- the step, and the end

    def exchange(self, value: Any) -> list[Any]:
        values = super().exchange(value)
        for pair in self._pairs.values():
            with suppress(Gone):
                pair.ring.end_step(self._operations.step)
        return values

    def close(self) -> None:
        super().close()
        self._ins, self._outs = {}, {}
        _hang_up(self._meeting, self._pairs, self._bell)


def _wait_to_meet(watch: Watch, peer: int, since: float) -> None:
    watch.waiting = Waiting(peer, None, -1, since)
    if watch.verdict is not None:
        raise after_loss(watch.verdict)


def _hang_up(meeting: Meeting, pairs: Pairs, bell: Bell) -> None:
    bell.close()
    meeting.close()
    pairs.close()
