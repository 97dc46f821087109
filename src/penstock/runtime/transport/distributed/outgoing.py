"""The sending end of a channel over gloo: packed or direct, waited for late, never more than a few under way."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import PeerFailure, UsageError
from penstock.runtime.messages import plain
from penstock.runtime.messages.secret import FILE_VARIABLE, has_secret
from penstock.runtime.state.ownership import version_of
from penstock.runtime.transport.channel import Channel, Outgoing
from penstock.runtime.transport.distributed import messages
from penstock.runtime.transport.distributed.device_link import Payload
from penstock.runtime.transport.distributed.messages import WHOLE_BYTES, ExpectedLayouts, Transfer, is_header_only
from penstock.runtime.transport.distributed.transfers import BackendTransfers, PeerConnection
from penstock.runtime.transport.failure.peer_failures import after_loss
from penstock.runtime.transport.interrupts import uninterrupted
from penstock.runtime.transport.layout import encoding
from penstock.runtime.transport.layout.layout import Book, Frame, Layout, flatten
from penstock.runtime.transport.layout.tensor_places import whole_lines

SMALL_SENDS = 4  # messages of one frame that may wait for longer than others: one wait is for all of them
_END = torch.ones(1, dtype=torch.uint8, device="cpu")


class UnderWay(NamedTuple):
    """A send that nobody has waited for yet, with all that must stay alive until then."""

    microbatch: int
    work: Any  # of what leaves last
    layout: Layout | None
    frame: Frame | Tensor
    earlier: Sequence[Transfer]  # what left before it
    watched: Sequence[tuple[Tensor, int]] = ()  # tensors that leave from their own memory, and their versions till then


class Following(NamedTuple):
    """A message that goes with a frame, sent but perhaps not taken yet, and the byte that says that it is."""

    microbatch: int
    receipt: Transfer
    body: list[Transfer]  # and its end, if it has one


class DistributedOutgoing(Outgoing):
    """The sending end of a channel.

    Gloo cannot be asked whether a send is done, only made to wait for it; so what was sent is released when `max_sends`
    later messages of its channel have been sent (small ones several at a time), or at `flush`. Such a wait ends when
    the receive is posted, which is what a proved program can rely on. It must not wait for a message that *follows* a
    frame: that one is received where it is used, which may be after something else that this rank has yet to send. For
    those the receiver sends a receipt, a byte that turns up in memory, where it can be seen without waiting.
    """

    def __init__(
        self,
        channel: Channel,
        tag: int,
        transfers: BackendTransfers,
        connection: PeerConnection,
        book: Book,
        max_sends: int,
    ) -> None:
        super().__init__(channel)
        self._expected = ExpectedLayouts(channel, tag)
        self._transfers, self._connection = transfers, connection
        self._book, self._max_sends = book, max_sends
        self._under_way: deque[UnderWay] = deque()
        self._following: list[Following] = []
        self._rewritten: list[int] = []  # microbatches whose memory was written to before they had left

    @property
    def under_way(self) -> list[int]:
        return [message.microbatch for message in self._under_way]

    @uninterrupted
    def send(self, microbatch: int) -> None:
        if microbatch not in self.ready:
            raise self._not_ready(microbatch)
        self._send(microbatch, self.ready[microbatch])
        del self.ready[microbatch]
        self.count += 1

    def _send(self, microbatch: int, value: Any) -> None:
        """Send a value as predicted where it looks so, in full where it does not."""
        if self._transfers.watch.verdict is not None:
            raise after_loss(self._transfers.watch.verdict)
        self._transfers.give_way()
        layout = self._expected.layouts.get(self.count)
        leaves = None if layout is None else layout.fits(value)
        if layout is None or leaves is None:
            self._send_changed(microbatch, layout, value)
        else:
            self._send_frame(microbatch, layout, leaves)

    def _send_frame(self, microbatch: int, layout: Layout, leaves: Sequence[Any]) -> None:
        """Send a message that needs no more words than its frame has."""
        # This comes before anything is announced.
        payload = layout.pack_on_device(leaves) if layout.device_bytes else None
        frame, directs = layout.packed(leaves)
        frame.header.raw = self._header(messages.DATA, microbatch, layout.checksum, 0)
        watched = [(tensor, version_of(tensor)) for _, tensor in directs if tensor is not None]
        earlier = [self._start(octets.cpu(), microbatch) for octets, _ in directs]
        work = self._send_last(microbatch, frame.tensor, layout, earlier)
        self._sent(UnderWay(microbatch, work, layout, frame, earlier, watched), payload)

    def _start(self, tensor: Tensor, microbatch: int, tag: int | None = None) -> Transfer:
        """Start to send a tensor, after all that has the channel's own tag unless it has another."""
        tag = self._expected.tag if tag is None else tag
        return Transfer(tensor, self._transfers.send(tensor, self._connection, tag, self.channel, microbatch))

    def _send_last(self, microbatch: int, frame: Tensor, layout: Layout | None, earlier: list[Transfer]) -> Any:
        """Send the frame, after the tensors that travel by themselves, and its end if the receiver waits for it."""
        last = self._start(frame, microbatch)
        if layout is not None and layout.frame_bytes > WHOLE_BYTES:
            earlier.append(last)
            last = self._start(_END, microbatch)
        return last.work

    def _send_changed(self, microbatch: int, predicted: Layout | None, value: Any) -> None:
        before = self._expected.layouts.get(self.count - 1)
        leaves = None if before is None else before.fits(value)
        if before is not None and leaves is not None:
            layout = before  # In a first step all microbatches look alike.
        else:
            taken = flatten(value)
            made, leaves = Layout.of(taken, self._connection.link is not None), taken.items
            if encoding.is_pickled(made.content) and not has_secret():
                raise UsageError(
                    f"stage {self.channel.source_stage} passes a value that can only travel pickled, over "
                    f"torch.distributed and in a run without a secret: nobody could tell it from a stranger's. Set "
                    f"{FILE_VARIABLE} on every host (docs/explanations/security.md), or pass tensors, numbers, text "
                    f"and containers of these"
                )
            layout = self._book.setdefault(made.text, made)
        if is_header_only(predicted) and self._expected.knows(layout):
            self._send_frame(microbatch, layout, leaves)
            self._expected.layouts[self.count] = layout
            return
        payload = layout.pack_on_device(leaves) if layout.device_bytes else None
        packed = layout.all_packed()
        body = Frame(whole_lines(packed.frame_bytes + len(layout.text)), packed.copies)
        packed.pack(leaves, body)
        body.header.raw = self._header(messages.CHANGED, microbatch, layout.checksum, len(layout.text))
        end = body.tensor.data_ptr() + body.tensor.numel()
        ctypes.memmove(end - len(layout.text), layout.text, len(layout.text))
        self._send_instead(microbatch, predicted, messages.CHANGED, body.tensor, payload)
        self._expected.layouts[self.count] = layout
        self._expected.learn(layout)

    def _send_failure(self, microbatch: int, failure: PeerFailure) -> None:
        body = torch.frombuffer(bytearray(plain.dumps(failure)), dtype=torch.uint8)
        self._send_instead(microbatch, self._expected.layouts.get(self.count), messages.FAILURE, body)

    def _send_instead(
        self, microbatch: int, predicted: Layout | None, kind: int, body: Tensor, payload: Payload | None = None
    ) -> None:
        """Send next to nothing for each large tensor, a header for a predicted frame, then the body and its end."""
        frame = torch.frombuffer(bytearray(self._header(kind, microbatch, 0, body.numel())), dtype=torch.uint8)
        earlier = [self._start(_END, microbatch) for _ in (() if predicted is None else predicted.directs)]
        work = self._send_last(microbatch, frame, predicted, earlier)
        tag, note = self._expected.following_tag(self.count), torch.zeros(1, dtype=torch.uint8, device="cpu")
        receipt = self._transfers.receive(note, self._connection, tag, self.channel, microbatch)
        following = [self._start(body, microbatch, tag)]
        if body.numel() > WHOLE_BYTES:
            following.append(self._start(_END, microbatch, tag))
        self._following.append(Following(microbatch, Transfer(note, receipt), following))
        self._sent(UnderWay(microbatch, work, None, frame, earlier), payload)

    def _header(self, kind: int, microbatch: int, checksum: int, follows: int) -> bytes:
        place = 0 if self._connection.link is None else self._connection.link.messages
        return self._expected.header(kind, checksum, follows, self._transfers.exchanges, self.count, microbatch, place)

    def _sent(self, message: UnderWay, payload: Payload | None) -> None:
        link = self._connection.link
        if link is not None:
            link.send(payload, self.channel, message.microbatch)
        self._transfers.give_way()
        under_way = self._under_way
        under_way.append(message)
        if len(under_way) > (self._max_sends if message.earlier else self._max_sends + SMALL_SENDS):
            self._finish(len(under_way) - self._max_sends)
        if self._following:
            self._finish_following([each for each in self._following if each.receipt.tensor.item()])

    def _finish_following(self, done: Sequence[Following]) -> None:
        is_short = self._transfers.is_taken_soon(is_known=False)
        for microbatch, receipt, body in done:
            for _, work in (receipt, *body):
                self._transfers.wait(work, self.channel.target_rank, self.channel, microbatch, is_short)
        self._following = [each for each in self._following if not any(each is other for other in done)]

    def _finish(self, count: int) -> None:
        """Wait for the oldest so many messages: they leave in order, so for the last of them."""
        under_way, peer = self._under_way, self.channel.target_rank
        last = under_way[count - 1]
        is_short = self._transfers.is_taken_soon(all(each.layout is not None for each in islice(under_way, count)))
        self._transfers.wait(last.work, peer, self.channel, last.microbatch, is_short)
        for _ in range(count):
            microbatch, _work, layout, frame, earlier, watched = under_way[0]
            for transfer in earlier:
                self._transfers.wait(transfer.work, peer, self.channel, microbatch, is_short)
            under_way.popleft()
            if layout is not None and isinstance(frame, Frame):
                layout.spare.append(frame)
            if watched and any(version_of(tensor) != version for tensor, version in watched):
                self._rewritten.append(microbatch)  # an error at the end of the step: until then, all is served

    def flush(self) -> list[int]:
        if self._under_way:
            self._finish(len(self._under_way))
        if self._following:
            self._finish_following(self._following)
        rewritten, self._rewritten = self._rewritten, []
        return rewritten

    def end_step(self) -> None:
        """Release what a failed step left under way: it may be written to."""
        super().end_step()
        self._rewritten.clear()
        for place, message in enumerate(self._under_way):
            self._under_way[place] = message._replace(watched=())
