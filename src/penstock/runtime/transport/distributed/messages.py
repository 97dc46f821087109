"""Messages of a channel on their way through gloo: their header, and what each end expects of the next one.

A message says in its first 64 bytes what it is, so that the receiver can prove that it is the due one before it takes a
byte as data: which channel, step and microbatch, its number among the channel's messages of this step, and the checksum
of the layout that the sender went by.

Each end remembers the layout of the k-th message of a step, which is the prediction for the k-th message of the next
one (argued in `transport`). The `count` of both ends is that k.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from torch import Tensor

from penstock.runtime.transport.channel import Channel, name_message
from penstock.runtime.transport.layout.layout import Layout
from penstock.runtime.transport.layout.tensor_places import HEADER_BYTES

SUBTAGS = 0x1000  # tags of one channel: one for frames, the others for what follows a frame

# The longest message that leaves in one piece: of a larger one, half may have come when its sender dies. A closed
# connection ends gloo's wait for what has not begun to come, but not for a message that has come in half: that lasts
# until its timeout. So what is waited for is something small that comes last: the frame after its large tensors, or one
# more byte, its end, after a message that is larger than this. The other way round nothing helps: a sender whose
# receiver dies in the middle of a message learns it by the timeout.
WHOLE_BYTES = 64 * 1024

MAGIC = 0x50454E53  # "PENS"
# Data of the layout with that checksum, mostly the predicted one: its bytes are in this frame and with it.
DATA = 1
CHANGED = 2  # looks different: a layout and all bytes follow in one message
FAILURE = 3  # there is no value: the reason follows, as plain values

LAYOUTS = 256  # introduced ones that each end of a channel remembers

HEADER = struct.Struct("<IIIQQIIIiiQ8x")
assert HEADER.size == HEADER_BYTES


class Header(NamedTuple):
    magic: int
    kind: int
    checksum: int  # The checksum of the layout.
    follows: int  # bytes of the next message that belongs to this one
    step: int
    ordinal: int
    microbatch: int
    direction: int
    source_stage: int
    target_stage: int
    place: int  # among all messages of the device's link, where there is one


def read_header(raw: bytes) -> Header:
    return Header._make(HEADER.unpack(raw))


def describe(header: Header) -> str:
    if header.magic != MAGIC:
        return f"something that is no message of Penstock (it begins with {header.magic:#010x})"
    channel = Channel(header.source_stage, header.target_stage, "F" if header.direction == ord("F") else "B", -1, -1)
    return f"{channel}, {name_message(header.microbatch, header.ordinal, header.step)}"


class Transfer(NamedTuple):
    """A tensor that travels by itself, and the operation that moves it."""

    tensor: Tensor
    work: Any


def is_header_only(layout: Layout | None) -> bool:
    """Return whether all that such a message sends by gloo is a header."""
    return layout is None or (layout.frame_bytes == HEADER_BYTES and not layout.directs)


class ExpectedLayouts:
    """What both ends of a channel know beforehand of its messages: the layouts of the last step, by their number.

    `known` are those that the sender has introduced whose tensors are all on a device's link, by their checksum. Such a
    message has a frame of one size in every layout, so it may have any of these without another word.
    """

    def __init__(self, channel: Channel, tag: int) -> None:
        self.tag = tag
        self._identity = (ord(channel.direction), channel.source_stage, channel.target_stage)
        self.layouts: dict[int, Layout] = {}  # The layout of message number k, until it looks different.
        self.known: dict[int, Layout] = {}

    def header(
        self, kind: int, checksum: int, follows: int, step: int, ordinal: int, microbatch: int, place: int
    ) -> bytes:
        return HEADER.pack(MAGIC, kind, checksum, follows, step, ordinal, microbatch, *self._identity, place)

    def fault_of(self, came: Header, due: Header) -> str | None:
        """Describe a message that is not the due one; what is left announces a new layout or a failure."""
        is_known = came.kind in (CHANGED, FAILURE) or (came.kind == DATA and came.checksum in self.known)
        if came.magic == MAGIC and came[4:] == due[4:] and is_known:
            return None
        is_other = came[4:] == due[4:]
        return describe(came) + (
            f" in another layout (checksum {came.checksum:#x}, not {due.checksum:#x})" if is_other else ""
        )

    def knows(self, layout: Layout) -> bool:
        """Return whether this layout was introduced, and is remembered."""
        known = self.known.get(layout.checksum)
        return known is not None and known.text == layout.text

    def learn(self, layout: Layout) -> None:
        """Remember a layout that was introduced; both ends forget at the same one."""
        if not layout.device_bytes or not is_header_only(layout):
            return
        if len(self.known) >= LAYOUTS:
            self.known.clear()
        self.known[layout.checksum] = layout

    def following_tag(self, ordinal: int) -> int:
        """Return the tag of what follows a frame: later frames may be posted on the channel's tag already."""
        return self.tag + 1 + ordinal % (SUBTAGS - 1)
