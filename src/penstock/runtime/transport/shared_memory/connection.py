"""The connection of two ranks on one host: a Unix socket for words, shared memory for numbers.

Every packet stands by itself, so that an interrupt between two of them leaves nothing half said::

    DATA          a message of a channel: which block it lies in and which layout it has
    FAILURE       a message whose place a failure takes, in the text of that number
    THROUGH_DISTRIBUTED  a message that comes through torch.distributed
    BLOCK         a new block, its memory attached
    RETIRED       a block that will not be used again
    LAYOUT        a part of a layout's text
    FORGET        all layouts so far are forgotten
    FAILURE_TEXT  a part of a failure's text
    POSTS         the words in which the receiver counts its posted receives, attached
    EXCHANGE      a part of what a rank has to say in the exchange that ends the step of that number
    WAKE          wakes a sender that waits for such a word
    BYE           the last packet: what closes after it has not died

Packets of all channels come in one order, and are filed by channel when they are read. Whoever waits for one rank
still reads what all others send, fifty times a second: a packet that lies unread would in the end fill its socket
and hold up a sender, and so make a program wait for more than its proof says. That is also when a death is seen of a
rank that nobody waits for yet.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from time import monotonic
from typing import NoReturn

from penstock.errors import MessageError, PeerFailure
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.failure.blame import Waiting
from penstock.runtime.transport.failure.peer_failures import CONNECTION_CLOSED, after_loss
from penstock.runtime.transport.failure.watch import Watch
from penstock.runtime.transport.interrupts import CTRL_C, DUE
from penstock.runtime.transport.layout.layout import Layout
from penstock.runtime.transport.shared_memory.blocks import BlockPool, InBlock, allocate, map_memory

DATA, FAILURE, THROUGH_DISTRIBUTED, BLOCK, RETIRED, LAYOUT = range(1, 7)
FORGET, FAILURE_TEXT, POSTS, EXCHANGE, WAKE, BYE = range(7, 13)

# Kind; number of the block or the text; key: the checksum of all channels and which one of them, elsewhere that
# checksum or a size; step; ordinal; microbatch; number of the layout, and its checksum.
HEAD = struct.Struct("<IIQQIIII")
TEXT_BYTES = 32 * 1024  # The most bytes of a text in one packet.
LAYOUTS = 128  # Each end remembers so many of the other's.
NO_BLOCK = 0xFFFF_FFFF
# Most answers come within this; to sleep and be woken costs about as much. Others run meanwhile: each look yields.
SPIN_SECONDS = 100e-6
SLICE_SECONDS = 0.02  # how long a read sleeps before whoever waits looks around
_SLICE = struct.pack("ll", 0, int(SLICE_SECONDS * 1e6))
_CLOEXEC = socket.MSG_CMSG_CLOEXEC  # what user code starts meanwhile gets no descriptor
_CLOEXEC_AT_ONCE = _CLOEXEC | socket.MSG_DONTWAIT
_FD_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)


class Gone(Exception):
    """The other end of the socket is closed."""


# A message: its kind, number, step, ordinal, microbatch, and the checksum of its layout and that.
Filed = tuple[int, int, int, int, int, int, Layout | None]


class Connection:
    """One rank's end of the connection to `peer`. `wait_for_room` is called while the socket takes no more."""

    def __init__(self, peer: int, connection: socket.socket, wait_for_room: Callable[[Connection], None]) -> None:
        self.peer = peer
        self.gone = False
        self.left = False  # Set once it said goodbye.
        self.pool = BlockPool(
            lambda number, descriptor: self.say(BLOCK, number, 0, [descriptor]),
            lambda number: self.say(RETIRED, number),
        )
        self.queues: dict[int, deque[Filed]] = defaultdict(deque)  # Indexed by channel.
        self.posts: dict[int, memoryview] = {}  # By checksum of channels: what the peer has posted.
        self.blocks: dict[int, InBlock] = {}
        self.failures: dict[int, bytes] = {}
        self.exchanges: deque[tuple[int, bytes]] = deque()  # Exchanges with their steps.
        self._layouts: dict[int, Layout] = {}  # the peer's
        self._parts: dict[int, list[bytes]] = {}  # texts of which more is to come
        self._book: dict[bytes, tuple[int, Layout]] = {}  # this rank's layouts that the peer knows
        self.kept: list[deque[tuple[int, Layout]]] = []  # what ends of channels know of these
        self._texts = 0
        self._socket = connection
        self._wait_for_room = wait_for_room
        self._buffers = [bytearray(HEAD.size + TEXT_BYTES)]
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)

    # -- out

    def write(self, packet: bytes, descriptors: Sequence[int] = ()) -> None:
        """Write one packet; wait where the socket is full."""
        while True:
            try:
                if descriptors:
                    socket.send_fds(self._socket, [packet], descriptors, socket.MSG_DONTWAIT)
                else:
                    self._socket.send(packet, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                self._wait_for_room(self)
            except OSError as error:
                if descriptors and not isinstance(error, ConnectionError):
                    raise  # So many descriptors may not be under way.
                self.gone = True
                raise Gone from error

    def say(self, kind: int, number: int = 0, key: int = 0, descriptors: Sequence[int] = ()) -> None:
        """Send a packet that is not a message of a channel."""
        self.write(HEAD.pack(kind, number, key, 0, 0, 0, 0, 0), descriptors)

    def share_posts(self, channels_checksum: int, count: int) -> memoryview:
        """Allocate words in which this rank counts its posted receives of a program, for the peer to read."""
        descriptor = allocate(count * 8)
        try:
            with suppress(Gone):  # It has left; what it sent before is still to be read.
                self.say(POSTS, 0, channels_checksum, [descriptor])
            return map_memory(descriptor).cast("Q")
        finally:
            os.close(descriptor)

    def write_note(self, kind: int, text: bytes, step: int = 0) -> int:
        """Send a text of any length; return the number by which the peer can look it up."""
        self._texts += 1
        for start in range(0, max(1, len(text)), TEXT_BYTES):
            head = HEAD.pack(kind, self._texts, len(text), step, 0, 0, 0, 0)
            self.write(head + text[start : start + TEXT_BYTES])
        return self._texts

    def introduce(self, layout: Layout) -> tuple[int, Layout]:
        """Return the number by which the peer knows this layout, and the object that stands for all equal ones."""
        known = self._book.get(layout.text)
        if known is None:
            if len(self._book) >= LAYOUTS:  # shapes never repeat
                self._book.clear()
                for notes in self.kept:
                    notes.clear()
                self.say(FORGET)
            known = self._book[layout.text] = (self.write_note(LAYOUT, layout.text), layout)
        return known

    # -- in

    def read(self, wait: bool) -> bool:
        """Read and file one packet; False if none has come, at once or after a short sleep."""
        flags = _CLOEXEC if wait else _CLOEXEC_AT_ONCE
        try:
            count, attached, _, _ = self._socket.recvmsg_into(self._buffers, _FD_SPACE, flags)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # It left without reading everything; what it sent before is still to be read.
        if count < HEAD.size:
            self.gone = True
            raise Gone
        kind, number, key, step, ordinal, microbatch, layout, checksum = HEAD.unpack_from(self._buffers[0])
        if kind == DATA:
            self.queues[key].append((kind, number, step, ordinal, microbatch, checksum, self._layouts[layout]))
        elif kind in (FAILURE, THROUGH_DISTRIBUTED):
            self.queues[key].append((kind, number, step, ordinal, microbatch, checksum, None))
        else:
            self._note(
                kind,
                number,
                key,
                step,
                bytes(self._buffers[0][HEAD.size : count]),
                _descriptors(attached) if attached else [],
            )
        return True

    def _note(self, kind: int, number: int, key: int, step: int, tail: bytes, descriptors: list[int]) -> None:
        try:
            if kind == BLOCK:
                self.blocks[number] = InBlock(self._map(descriptors))
            elif kind == POSTS:
                self.posts[key] = self._map(descriptors).cast("Q")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if kind == RETIRED:
            self.blocks.pop(number, None)
        elif kind == FORGET:
            self._layouts.clear()
        elif kind == BYE:
            self.left = True
        elif kind in (LAYOUT, FAILURE_TEXT, EXCHANGE):
            parts = self._parts.setdefault(number, [])
            parts.append(tail)
            if sum(map(len, parts)) < key:  # the length of the text
                return
            text = b"".join(self._parts.pop(number))
            if kind == LAYOUT:
                self._layouts[number] = Layout.load(text, is_known=True).all_packed()
            elif kind == EXCHANGE:
                self.exchanges.append((step, text))
            else:
                self.failures[number] = text

    def _map(self, descriptors: list[int]) -> memoryview:
        """Map the memory that came with a packet; the sender counts on it, so there is no way on without."""
        try:
            if not descriptors:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # The kernel dropped it.
            return map_memory(descriptors[0])
        except OSError as error:
            raise MessageError(
                f"shared memory that rank {self.peer} sent cannot be mapped: {error.strerror}; "
                "raise this process's limits (ulimit -n, ulimit -v) or set PENSTOCK_TRANSPORT=distributed"
            ) from error

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Say goodbye and leave."""
        if self._socket.fileno() >= 0:
            with suppress(OSError):
                self._socket.send(HEAD.pack(BYE, 0, 0, 0, 0, 0, 0, 0), socket.MSG_DONTWAIT)
            self._socket.close()
        for held in (self.pool, self.blocks, self.queues, self.posts):
            held.clear()


class Connections(dict[int, Connection]):
    """All connections of one rank, by peer, and waiting on them.

    `busy_with` is the channel and microbatch that this rank is sending or posting.
    """

    def __init__(self, rank: int, watch: Watch) -> None:
        super().__init__()
        self.busy_with: tuple[Channel | None, int] = (None, -1)
        self._rank, self._watch = rank, watch

    def wait(
        self, connection: Connection, channel: Channel | None, microbatch: int, done: Callable[[], object]
    ) -> None:
        """Read what the peer sends until it is done; the watch sees for whom, and ends the wait if that is hopeless."""
        watch = self._watch
        watch.waiting = waiting = Waiting(connection.peer, channel, microbatch, monotonic())
        awake = waiting.since + SPIN_SECONDS
        try:
            while not done():
                if watch.verdict is not None:
                    raise after_loss(watch.verdict)
                if CTRL_C.state is DUE:
                    CTRL_C.raise_due()
                if monotonic() < awake:
                    if not connection.read(False):
                        os.sched_yield()
                elif not connection.read(True):
                    self._look_around()
        except Gone:
            self.lose(waiting)
        finally:
            watch.waiting = None

    def wait_for_room(self, connection: Connection) -> None:
        """Read what others, perhaps waiting alike, have sent, while the socket is full because its reader is behind."""
        watch = self._watch
        watch.waiting = Waiting(connection.peer, *self.busy_with, monotonic())
        try:
            self._look_around()
            while not select.select([], [connection], [], SLICE_SECONDS)[1]:
                if watch.verdict is not None:
                    raise after_loss(watch.verdict)
                self._look_around()
        finally:
            watch.waiting = None

    def _look_around(self) -> None:
        for connection in self.values():
            try:
                while not connection.gone and connection.read(False):
                    pass
            except Gone:
                if not connection.left:
                    lost = PeerFailure(connection.peer, f"{CONNECTION_CLOSED}, seen by rank {self._rank}")
                    raise copy(self._watch.propose(lost)) from None

    def put_exchange(self, peer: int, step: int, body: bytes) -> None:
        self.busy_with = None, -1
        try:
            self[peer].write_note(EXCHANGE, body, step)
        except Gone:
            self.lose(Waiting(peer, None, -1, monotonic()))

    def has_exchange(self, peer: int, step: int) -> bool:
        """Return whether the peer's report at the end of that step is here. Waits for nobody."""
        connection = self[peer]
        with suppress(Gone):  # Whoever waits for it will find out.
            while not connection.exchanges and connection.read(False):
                pass
        return bool(connection.exchanges) and connection.exchanges[0][0] == step

    def get_exchange(self, peer: int) -> tuple[int, bytes]:
        exchanges = self[peer].exchanges
        if not exchanges:
            self.wait(self[peer], None, -1, exchanges.__len__)
        return exchanges.popleft()

    def lose(self, waiting: Waiting) -> NoReturn:
        """Raise the group's verdict on a connection that is closed."""
        self._watch.waiting = None
        raise copy(self._watch.propose(self._watch.describe(waiting).blame(self._rank, CONNECTION_CLOSED))) from None

    def close(self) -> None:
        for connection in self.values():
            connection.close()
        self.clear()


def _descriptors(attached: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in attached:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
