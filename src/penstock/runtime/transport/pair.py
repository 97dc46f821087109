"""The connection of two ranks on one host: a Unix socket for words, shared memory for numbers.

Every packet stands by itself, so that an interrupt between two of them leaves nothing half said::

    DATA     a message of a channel: which block it lies in and which layout it has
    FAILURE  a message whose place a failure takes, in the text of that number
    FAR      a message that comes through torch.distributed
    BLOCK    a new block, its memory attached; RETIRED: one that will not be used again
    LAYOUT   a part of a layout's text, FORGET: all layouts so far; FAILED: a part of a failure's text
    POSTS    the words in which the receiver counts its posted receives, attached
    NUDGE    wakes a sender that waits for such a word
    BYE      the last packet: what closes after it has not died

Packets of all channels come in one order, and are filed by channel when they are read; whoever waits
reads the packets of everybody, so that no sender is held up by a rank that waits for another.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import defaultdict, deque
from typing import Any, NamedTuple

from penstock.runtime.transport.blocks import InBlock, Ring, map_memory
from penstock.runtime.transport.layout import Layout

__all__ = ["DATA", "FAILURE", "FAR", "Bell", "Gone", "Pair"]

DATA, FAILURE, FAR, BLOCK, RETIRED, LAYOUT, FORGET, FAILED, POSTS, NUDGE, BYE = range(1, 12)

HEAD = struct.Struct("<IIQQIIII")  # as `Bell`
TEXT_BYTES = 32 * 1024  # of a text in one packet
BUFFER_BYTES = TEXT_BYTES + HEAD.size
LAYOUTS = 1024
NO_BLOCK = 0xFFFF_FFFF
SLICE_SECONDS = 0.02  # how long a read sleeps before whoever waits looks around
_SLICE = struct.pack("ll", 0, int(SLICE_SECONDS * 1e6))
_FD_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)


class Gone(Exception):
    """The other end of the socket is closed."""


class Bell(NamedTuple):
    """What one packet says."""

    kind: int
    number: int  # of the block, or of the text
    key: int  # the channel and its program; of other packets: a size
    step: int
    ordinal: int
    microbatch: int
    layout: int
    checksum: int


class Pair:
    """One rank's end of the connection to `peer`."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer = peer
        self.gone = False
        self.left = False  # it said goodbye
        self.ring = Ring(self._announce, self._retire)
        self.queues: dict[int, deque[tuple[Bell, Layout | None]]] = defaultdict(deque)  # by channel
        self.posts: dict[int, memoryview] = {}  # by program: what the peer has posted
        self.blocks: dict[int, InBlock] = {}
        self.failures: dict[int, bytes] = {}
        self._layouts: dict[int, Layout] = {}  # the peer's
        self._parts: dict[tuple[int, int], list[bytes]] = {}  # texts of which more is to come
        self._book: dict[bytes, tuple[int, Layout]] = {}  # this rank's layouts that the peer knows
        self._numbers = 0
        self._socket = connection
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)

    # -- out

    def write(self, *fields: int) -> None:
        """One packet without a tail. BlockingIOError if the socket is full."""
        try:
            self._socket.send(HEAD.pack(*fields), socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise
        except OSError as error:
            self.gone = True
            raise Gone from error
