"""Receiving: posted early, checked on arrival, built where it is used."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from penstock.errors import MessageError, PeerFailure, UsageError
from penstock.messages.secret import has_secret
from penstock.runtime.transport.base import failure_from, wrong_message
from penstock.runtime.transport.gloo.header import (
    CHANGED,
    DATA,
    FAILURE,
    HEADER,
    MAGIC,
    Header,
    describe,
    raw_header,
    read_header,
)
from penstock.runtime.transport.gloo.links import Incoming, Part, Pending, has_end
from penstock.runtime.transport.gloo.operations import Operations
from penstock.runtime.transport.layout.layout import HEADER_BYTES, Book, Layout

__all__ = ["Inbox"]


_RECEIPT = torch.ones(1, dtype=torch.uint8)
_END = torch.empty(1, dtype=torch.uint8)  # takes the ends of all messages, which say nothing


class Inbox:
    """Takes messages off incoming links. Buffers are made when a receive is posted and belong to the value then."""

    def __init__(self, operations: Operations, book: Book, device: torch.device | None) -> None:
        self._operations = operations
        self._book = book
        self._device = device

    def post(self, link: Incoming, microbatch: int) -> Pending:
        """Make ready for the next message of the link, as far as it is predicted: even the value is built now.

        What can be done here is off the critical path, which begins when the message comes.
        """
        if microbatch in link.pending:
            raise UsageError(f"{link.edge.receive_action(microbatch)} is posted already")
        layout, operations = link.predicted(), self._operations
        frame = torch.empty(HEADER_BYTES if layout is None else layout.frame_bytes, dtype=torch.uint8)
        due = HEADER.pack(
            MAGIC, DATA, layout.checksum if layout else 0, 0, operations.step, link.count, microbatch, *link.identity
        )
        directs: list[Part] = []
        value = None
        if layout is not None:
            for home in layout.directs:
                device = self._device if operations.travels_by_device(home.device) else None
                directs.append(operations.receive_part(home.make_carrier(device), link, microbatch))
        before, work = None, operations.receive(frame, link.peer, link.tag, link.edge, microbatch)
        if has_end(frame.numel()):
            before, work = work, operations.receive(_END, link.peer, link.tag, link.edge, microbatch)
        if layout is not None and layout.comes_ready(operations.device_backend is not None):
            value = layout.build(frame, [part.tensor for part in directs] if directs else (), self._device)
        pending = link.pending[microbatch] = Pending(link.count, due, value, layout, frame, work, directs, before)
        link.count += 1
        return pending

    def take(self, link: Incoming, microbatch: int) -> Any:
        """The value of the message, or the failure that was sent instead, raised."""
        pending = link.pending.get(microbatch) or self.post(link, microbatch)
        header = self._arrive(link, microbatch, pending)
        if header is None:
            layout = pending.layout
            if layout is None or layout.comes_ready(self._operations.device_backend is not None):
                return pending.value
            return layout.build(pending.frame, [part.tensor for part in pending.directs], self._device)
        if header.kind == CHANGED:
            return self._take_changed(link, microbatch, header)
        raise self._take_failure(link, microbatch, header)

    def drop(self, link: Incoming, microbatch: int) -> PeerFailure | None:
        """Take the message and forget it, but for the failure that it may be and for what it says of the layout."""
        pending = link.pending.get(microbatch) or self.post(link, microbatch)
        header = self._arrive(link, microbatch, pending)
        if header is None:
            return None
        if header.kind == FAILURE:
            return self._take_failure(link, microbatch, header)
        self._take_changed(link, microbatch, header)
        return None

    def _arrive(self, link: Incoming, microbatch: int, pending: Pending) -> Header | None:
        """Wait for a posted message with all its parts, and prove that it is the due one.

        Returns None where all is as predicted, and the header where it announces something else.
        """
        # What comes last is waited for first (see `has_end`): the thread then sleeps and wakes once. (And each work
        # only once: gloo would wait for a second arrival.)
        self._operations.wait(pending.work, link.peer, link.edge, microbatch)
        if pending.before is not None:
            self._operations.wait(pending.before, link.peer, link.edge, microbatch)
        if pending.directs:
            for part in reversed(pending.directs):
                self._operations.wait_part(part, link.peer, link.edge, microbatch)
        raw = raw_header(pending.frame)
        header = None
        if raw != pending.due or pending.layout is None:
            header = self._check(link, read_header(raw), read_header(pending.due))
        del link.pending[microbatch]
        return header

    def _check(self, link: Incoming, came: Header, due: Header) -> Header:
        """Refuse what is for another place; what is left announces a new layout or a failure."""
        if came.magic == MAGIC and came[4:] == due[4:] and came.kind in (CHANGED, FAILURE):
            return came
        text = describe(came)
        if came[4:] == due[4:]:
            text = f"{text} in another layout (checksum {came.checksum:#x}, not {due.checksum:#x})"
        error = wrong_message(link.edge, f"microbatch {due.microbatch}, number {due.ordinal} of step {due.step}", text)
        operations = self._operations
        operations.abort(PeerFailure(operations.rank, f"MessageError: {error}", stage=link.edge.target_stage))
        raise error

    def _take_changed(self, link: Incoming, microbatch: int, header: Header) -> Any:
        body = self._follow(link, microbatch, header)
        text_bytes = read_header(raw_header(body)).follows if header.follows >= HEADER_BYTES else 0
        if not 0 < text_bytes <= header.follows - HEADER_BYTES:
            raise MessageError(
                f"{link.edge}: a message of {header.follows} bytes says that {text_bytes} of them are its layout"
            )
        text = ctypes.string_at(body.data_ptr() + header.follows - text_bytes, text_bytes)
        layout = self._book.intern(text, lambda: Layout.load(text, is_known=has_secret()))
        link.remember(header.ordinal, layout)
        return layout.all_packed().build(body, (), self._device)

    def _take_failure(self, link: Incoming, microbatch: int, header: Header) -> PeerFailure:
        body = self._follow(link, microbatch, header)
        return failure_from(ctypes.string_at(body.data_ptr(), header.follows), link.peer)

    def _follow(self, link: Incoming, microbatch: int, header: Header) -> Tensor:
        """The message that a header announced."""
        operations, peer, edge = self._operations, link.peer, link.edge
        tag = link.following_tag(header.ordinal)
        body = torch.empty(header.follows, dtype=torch.uint8)
        work = operations.receive(body, peer, tag, edge, microbatch)
        if has_end(header.follows):
            operations.wait(operations.receive(_END, peer, tag, edge, microbatch), peer, edge, microbatch)
        operations.wait(work, peer, edge, microbatch)
        # The receipt: the sender posted its receive before it sent the body, so this wait is for nobody.
        operations.wait(operations.send(_RECEIPT, peer, tag, edge, microbatch), peer, edge, microbatch)
        return body
