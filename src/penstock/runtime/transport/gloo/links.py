"""The two ends of the channels of one program, as one rank of a distributed group keeps them.

Each end remembers the layout of the k-th message of a step, which is the prediction for the
k-th message of the next one (argued in `transport`). `count` is that k on both ends.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from penstock.errors import UsageError
from penstock.runtime.transport.base import Channel
from penstock.runtime.transport.layout.layout import Frame, Layout

__all__ = ["SUBTAGS", "Following", "Incoming", "Links", "Outgoing", "Part", "Pending", "UnderWay", "has_end"]

SUBTAGS = 0x1000  # tags of one channel: one for frames, the others for what follows a frame
WHOLE_BYTES = 64 * 1024  # a message that leaves in one piece: of a larger one, half may have come when its sender dies


def has_end(size: int) -> bool:
    """Whether a byte is sent after a message of so many bytes, to be waited for.

    Gloo ends a wait for what has not begun to come when its connection closes, but not a wait for a message that has
    come in half: that lasts until its timeout. So what is waited for is something small that comes last: the frame
    after its large tensors, or this byte after what is large itself.

    The other way round nothing helps: a sender whose receiver dies in the middle of a message learns it by the timeout.
    """
    return size > WHOLE_BYTES


class Part(NamedTuple):
    """A tensor that travels by itself, and the operation that moves it."""

    tensor: Tensor
    work: Any
    on_device: bool


class Pending(NamedTuple):
    """A posted receive. `due` is the header that it should bring; `value` is built around the empty buffers.

    `work` is of what comes last, `before` of a frame that is not that.
    """

    ordinal: int
    due: bytes
    value: Any
    layout: Layout | None
    frame: Tensor
    work: Any
    directs: Sequence[Part]
    before: Any = None


class UnderWay(NamedTuple):
    """A send that nobody has waited for yet, with all that must stay alive until then.

    `watched`: tensors that leave from their own memory, and the versions that they must have until they have left.
    """

    microbatch: int
    work: Any
    layout: Layout | None
    frame: Frame | Tensor
    parts: Sequence[Part]
    watched: Sequence[tuple[Tensor, int]] = ()


class Following(NamedTuple):
    """A message that goes with a frame, sent but perhaps not taken yet, its end, and the byte that says that it is."""

    body: Part
    end: Part | None
    receipt: Part
    microbatch: int


class End:
    """What both ends of a channel have."""

    def __init__(self, edge: Channel, peer: int, tag: int) -> None:
        self.edge = edge
        self.peer = peer
        self.tag = tag
        self.identity = (ord(edge.direction), edge.source_stage, edge.target_stage)
        self.count = 0
        self.layouts: list[Layout | None] = []

    def predicted(self) -> Layout | None:
        """What the next message of this step should look like."""
        return self.layouts[self.count] if self.count < len(self.layouts) else None

    def remember(self, ordinal: int, layout: Layout) -> None:
        """Message number `ordinal` of a step looks like that, until it looks different."""
        while len(self.layouts) <= ordinal:
            self.layouts.append(None)
        self.layouts[ordinal] = layout

    def following_tag(self, ordinal: int) -> int:
        """What follows a frame has a tag of its own: later frames may be posted on the channel's tag already."""
        return self.tag + 1 + ordinal % (SUBTAGS - 1)


class Incoming(End):
    def __init__(self, edge: Channel, tag: int) -> None:
        super().__init__(edge, edge.source_rank, tag)
        self.pending: dict[int, Pending] = {}


class Outgoing(End):
    def __init__(self, edge: Channel, tag: int) -> None:
        super().__init__(edge, edge.target_rank, tag)
        self.under_way: deque[UnderWay] = deque()
        self.following: list[Following] = []
        self.rewritten: list[int] = []  # microbatches whose memory was written to before they had left


class Links:
    """The ends that live on one rank, by the index of their channel."""

    def __init__(self, channels: Sequence[Channel], rank: int, tag: int) -> None:
        self.channels = channels
        self.program = zlib.crc32(repr(channels).encode())  # which program this is, in a number
        self.rank = rank
        self.ins: dict[int, Incoming] = {}
        self.outs: dict[int, Outgoing] = {}
        for index, edge in enumerate(channels):
            if edge.target_rank == rank:
                self.ins[index] = Incoming(edge, tag + index * SUBTAGS)
            elif edge.source_rank == rank:
                self.outs[index] = Outgoing(edge, tag + index * SUBTAGS)

    def missing(self, channel: int, wanted: str) -> UsageError:
        """Why there is no such end here."""
        if not 0 <= channel < len(self.channels):
            return UsageError(f"channel {channel} is not open; {len(self.channels)} are")
        edge = self.channels[channel]
        ends = f"rank {edge.source_rank} to {edge.target_rank}"
        return UsageError(f"rank {self.rank} cannot {wanted} on channel {channel} ({edge}), which goes from {ends}")

    def counts(self) -> tuple[dict[int, int], dict[int, int]]:
        """How many messages of each channel this rank has sent, and has taken, in this step."""
        sent = {index: link.count for index, link in self.outs.items() if link.count}
        taken = {index: link.count - len(link.pending) for index, link in self.ins.items() if link.count}
        return sent, taken

    def end_step(self) -> None:
        """Count from 0 again. What a failed step left under way is nobody's any more, and may be written to."""
        for link in (*self.ins.values(), *self.outs.values()):
            link.count = 0
        for out in self.outs.values():
            out.rewritten.clear()
            for place, message in enumerate(out.under_way):
                out.under_way[place] = message._replace(watched=())

    def check_idle(self, call: str) -> None:
        """A posted receive cannot be taken back, so nothing may be posted where links are laid anew."""
        for link in self.ins.values():
            self._check_idle(call, link.edge, link.pending)

    def _check_idle(self, call: str, edge: Channel, microbatches: Collection[int]) -> None:
        if microbatches:
            waiting = ", ".join(map(edge.receive_action, microbatches))
            raise UsageError(f"{call} while {waiting} is posted; receive or discard it first")
