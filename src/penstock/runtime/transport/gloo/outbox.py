"""Sending: packed or direct, waited for late, and never more than a few under way."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PeerFailure, UsageError
from penstock.messages import plain
from penstock.messages.secret import FILE_VARIABLE, has_secret
from penstock.runtime.state.memory import version_of
from penstock.runtime.transport.gloo.header import CHANGED, DATA, FAILURE, HEADER, MAGIC, blank_header
from penstock.runtime.transport.gloo.links import Following, Outgoing, Part, UnderWay, has_end
from penstock.runtime.transport.gloo.operations import Operations
from penstock.runtime.transport.layout import encoding
from penstock.runtime.transport.layout.layout import Book, Frame, Layout, flatten
from penstock.runtime.transport.layout.tensor_places import whole_lines

__all__ = ["Outbox"]

_END = torch.ones(1, dtype=torch.uint8)


class Outbox:
    """Puts messages on outgoing links.

    Gloo cannot be asked whether a send is done, only made to wait for it; so what was sent is
    released when `max_sends` later messages of its link have been sent, or at `finish`. Such a wait
    ends when the receive is posted, which is what a proved program can rely on. It must not wait
    for a message that *follows* a frame: that one is received where it is used, which may be after
    something else that this rank has yet to send. For those the receiver sends a receipt, a byte
    that turns up in memory, where it can be seen without waiting.
    """

    def __init__(self, operations: Operations, book: Book, device: torch.device | None, max_sends: int) -> None:
        self._operations = operations
        self._book = book
        self._device = device
        self._max_sends = max_sends

    def send(self, link: Outgoing, microbatch: int, value: Any) -> None:
        """As predicted where the value looks so, in full where it does not."""
        layout = link.predicted()
        leaves = None if layout is None else layout.fits(value)
        if layout is None or leaves is None:
            self._send_changed(link, microbatch, layout, value)
            return
        frame, operations = layout.take_frame(), self._operations
        HEADER.pack_into(
            frame.header, 0, MAGIC, DATA, layout.checksum, 0, operations.step, link.count, microbatch, *link.identity
        )
        directs = layout.pack(leaves, frame)
        if not directs and not has_end(layout.frame_bytes):
            work = operations.send(frame.tensor, link.peer, link.tag, link.edge, microbatch)
            self._sent(link, UnderWay(microbatch, work, layout, frame, ()))
            return
        watched = [(tensor, version_of(tensor)) for _, tensor in directs if tensor is not None]
        parts = [operations.send_part(octets, link, microbatch) for octets, _ in directs]
        work = self._send_last(link, microbatch, frame.tensor, layout, parts)
        self._sent(link, UnderWay(microbatch, work, layout, frame, parts, watched))

    def _send_last(
        self, link: Outgoing, microbatch: int, frame: Tensor, layout: Layout | None, parts: list[Part]
    ) -> Any:
        """The frame, after the tensors that travel by themselves, and its end where the receiver waits for that."""
        work = self._operations.send(frame, link.peer, link.tag, link.edge, microbatch)
        if layout is not None and has_end(layout.frame_bytes):
            parts.append(Part(frame, work, False))
            work = self._operations.send(_END, link.peer, link.tag, link.edge, microbatch)
        return work

    def _send_changed(self, link: Outgoing, microbatch: int, predicted: Layout | None, value: Any) -> None:
        before = link.layouts[link.count - 1] if 0 < link.count <= len(link.layouts) else None
        leaves = None if before is None else before.fits(value)
        if before is not None and leaves is not None:
            layout = before  # as in a first step, where all microbatches look alike
        else:
            taken = flatten(value)
            made, leaves = Layout.of(taken, self._operations.device_backend is not None), taken.items
            if encoding.is_pickled(made.content) and not has_secret():
                raise UsageError(
                    f"stage {link.edge.source_stage} passes a value that can only travel pickled, over "
                    f"torch.distributed and in a run without a secret: nobody could tell it from a stranger's. Set "
                    f"{FILE_VARIABLE} on every host (docs/security.md), or pass tensors, numbers, text and containers "
                    f"of these"
                )
            layout = self._book.intern(made.text, lambda: made)
        packed = layout.all_packed()
        body = Frame(whole_lines(packed.frame_bytes + len(layout.text)), packed.copies)
        packed.pack(leaves, body)
        self._write_header(body.header, CHANGED, link, microbatch, layout.checksum, len(layout.text))
        end = body.tensor.data_ptr() + body.tensor.numel()
        ctypes.memmove(end - len(layout.text), layout.text, len(layout.text))
        ordinal = link.count
        self._send_instead(link, microbatch, predicted, CHANGED, body.tensor)
        link.remember(ordinal, layout)

    def send_failure(self, link: Outgoing, microbatch: int, failure: PeerFailure) -> None:
        """The reason why there is no value, in its place."""
        body = torch.frombuffer(bytearray(plain.dumps(failure)), dtype=torch.uint8)
        self._send_instead(link, microbatch, link.predicted(), FAILURE, body)

    def _send_instead(self, link: Outgoing, microbatch: int, predicted: Layout | None, kind: int, body: Tensor) -> None:
        """Next to nothing for each large tensor, a header where a frame was predicted, then the body and its end."""
        operations, edge = self._operations, link.edge
        frame, header = blank_header()
        self._write_header(header, kind, link, microbatch, 0, body.numel())
        parts: list[Part] = []
        for home in predicted.directs if predicted is not None else ():
            by_device = operations.travels_by_device(home.device)  # NCCL must send as much as is received
            filler = torch.zeros(
                home.carried if by_device else 1, dtype=torch.uint8, device=self._device if by_device else None
            )
            parts.append(operations.send_part(filler, link, microbatch))
        work = self._send_last(link, microbatch, frame, predicted, parts)
        tag = link.following_tag(link.count)
        note = torch.zeros(1, dtype=torch.uint8)
        receipt = Part(note, operations.receive(note, link.peer, tag, edge, microbatch), False)
        following = Part(body, operations.send(body, link.peer, tag, edge, microbatch), False)
        end = None
        if has_end(body.numel()):
            end = Part(_END, operations.send(_END, link.peer, tag, edge, microbatch), False)
        link.following.append(Following(following, end, receipt, microbatch))
        self._sent(link, UnderWay(microbatch, work, None, frame, parts))

    def _write_header(
        self, buffer: Any, kind: int, link: Outgoing, microbatch: int, checksum: int, follows: int
    ) -> None:
        step = self._operations.step
        HEADER.pack_into(buffer, 0, MAGIC, kind, checksum, follows, step, link.count, microbatch, *link.identity)

    def _sent(self, link: Outgoing, message: UnderWay) -> None:
        link.count += 1
        link.under_way.append(message)
        if len(link.under_way) > self._max_sends:
            self._finish_oldest(link)
        if link.following:
            self._finish_following(link, [each for each in link.following if each.receipt.tensor.item()])

    def _finish_following(self, link: Outgoing, done: Sequence[Following]) -> None:
        for each in done:
            for part in (each.receipt, each.body, each.end):
                if part is not None:
                    self._operations.wait_part(part, link.peer, link.edge, each.microbatch)
        link.following = [each for each in link.following if not any(each is other for other in done)]

    def _finish_oldest(self, link: Outgoing) -> None:
        message = link.under_way[0]
        self._operations.wait(message.work, link.peer, link.edge, message.microbatch)
        for part in message.parts:
            self._operations.wait_part(part, link.peer, link.edge, message.microbatch)
        link.under_way.popleft()
        if message.layout is not None and isinstance(message.frame, Frame):
            message.layout.give_back(message.frame)
        if any(version_of(tensor) != version for tensor, version in message.watched):
            link.rewritten.append(message.microbatch)  # an error at the end of the step: until then, links are served

    def finish(self, link: Outgoing) -> list[int]:
        """Wait until all that was sent on the link has left; microbatches that were written to before they had."""
        while link.under_way:
            self._finish_oldest(link)
        self._finish_following(link, link.following)
        rewritten, link.rewritten = link.rewritten, []
        return rewritten
