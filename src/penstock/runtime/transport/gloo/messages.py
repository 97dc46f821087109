"""Messages of a channel on their way through gloo, and what each end expects of the next one.

Each end remembers the layout of the k-th message of a step, which is the prediction for the
k-th message of the next one (argued in `transport`). The `count` of both ends is that k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.layout.layout import Frame, Layout

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


class ExpectedLayouts:
    """What both ends of a channel know beforehand of its messages: the layouts of the last step, in their order."""

    def __init__(self, edge: Channel, tag: int) -> None:
        self.tag = tag
        self.identity = (ord(edge.direction), edge.source_stage, edge.target_stage)
        self.layouts: list[Layout | None] = []

    def of(self, ordinal: int) -> Layout | None:
        """What message number `ordinal` of this step should look like."""
        return self.layouts[ordinal] if ordinal < len(self.layouts) else None

    def remember(self, ordinal: int, layout: Layout) -> None:
        """Message number `ordinal` of a step looks like that, until it looks different."""
        while len(self.layouts) <= ordinal:
            self.layouts.append(None)
        self.layouts[ordinal] = layout

    def following_tag(self, ordinal: int) -> int:
        """What follows a frame has a tag of its own: later frames may be posted on the channel's tag already."""
        return self.tag + 1 + ordinal % (SUBTAGS - 1)
