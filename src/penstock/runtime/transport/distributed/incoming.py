"""The receiving end of a channel over gloo: posted early, checked on arrival, built where it is used.

Posting is what the program does; the backend may have the receive before. How many there will be in a step is known
when it begins (`expect`), and a receive that gloo has must be received: so no more are given to it than will be posted.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import MessageError, PeerFailure
from penstock.runtime.messages.secret import has_secret
from penstock.runtime.transport.channel import Channel, Incoming, name_message
from penstock.runtime.transport.distributed import messages
from penstock.runtime.transport.distributed.device_link import Arrival
from penstock.runtime.transport.distributed.messages import WHOLE_BYTES, ExpectedLayouts, Header, Transfer, read_header
from penstock.runtime.transport.distributed.transfers import BackendTransfers, PeerConnection
from penstock.runtime.transport.failure.peer_failures import failure_from
from penstock.runtime.transport.handover import arrive
from penstock.runtime.transport.interrupts import uninterrupted
from penstock.runtime.transport.layout.layout import Book, Layout
from penstock.runtime.transport.layout.tensor_places import HEADER_BYTES

AHEAD = 16  # receives of a channel that the backend may have before they are posted
AHEAD_LEFT = 4  # The backend is given more receives once it has so few left.
AHEAD_BYTES = WHOLE_BYTES  # The most bytes of each.

_NOTHING: AbstractContextManager[object] = nullcontext()
_RECEIPT = torch.ones(1, dtype=torch.uint8, device="cpu")
_END = torch.empty(1, dtype=torch.uint8, device="cpu")  # takes the ends of all messages, which say nothing


class Pending(NamedTuple):
    """A posted receive, and once it has come, its payload on a device's link or the failure that came instead."""

    due: bytes  # the header that it should bring
    value: Any  # built around the empty buffers
    layout: Layout | None
    frame: Tensor
    work: Any  # of what comes last
    directs: Sequence[Transfer]
    before: Any  # the work of a frame that does not come last
    is_built: bool  # Otherwise the value is to be made later.
    payload: Arrival | None = None
    failure: PeerFailure | None = None


class DistributedIncoming(Incoming):
    """The receiving end of a channel. Buffers are made when a receive is posted and belong to the value then."""

    posted: dict[int, Pending]

    def __init__(
        self,
        channel: Channel,
        tag: int,
        transfers: BackendTransfers,
        connection: PeerConnection,
        book: Book,
        device: torch.device | None,
    ) -> None:
        super().__init__(channel)
        self._expected = ExpectedLayouts(channel, tag)
        self._transfers, self._connection = transfers, connection
        self._book, self._device = book, device
        self._arrived: dict[int, Pending] = {}  # messages whose frames had to be taken before anybody wanted them
        self._coming = 0  # receives of this step, where that is known beforehand
        self._ahead: deque[tuple[Layout | None, Tensor, Any]] = deque()  # The backend has these before they are posted.

    @uninterrupted
    def expect(self, receives: int) -> None:
        self._coming = self.count + receives
        self._post_ahead()

    def _post_ahead(self, microbatch: int = -1) -> None:
        """Give the backend the receives of the next messages, as long as they are small, several at a time.

        Gloo tells the sender of each receive. A send that finds it announced leaves at once; any other waits for one
        way there and back. Announcements in a row wake the thread on the other side once.
        """
        for ordinal in range(self.count + len(self._ahead), min(self._coming, self.count + AHEAD)):
            layout = self._expected.layouts.get(ordinal)
            if layout is not None and (layout.directs or layout.frame_bytes > AHEAD_BYTES):
                return
            frame = _frame_for(layout)
            self._ahead.append((layout, frame, self._start(frame, microbatch)))

    @uninterrupted
    def post(self, microbatch: int) -> None:
        if microbatch in self.posted:
            raise self._posted_already(microbatch)
        self.posted[microbatch] = self._post(microbatch)
        self.count += 1

    def _post(self, microbatch: int) -> Pending:
        """Make ready for the next message as far as it is predicted, before the critical path: even the value."""
        transfers, directs, before = self._transfers, list[Transfer](), None
        if len(self._ahead) <= AHEAD_LEFT:
            self._post_ahead(microbatch)
        if self._ahead:
            layout, frame, work = self._ahead.popleft()
        else:
            layout = self._expected.layouts.get(self.count)
            directs, frame, before, work = self._receive(microbatch, layout)
        place, link = 0, self._connection.link
        if link is not None:
            place = link.messages
            link.messages += 1
            link.posted.append((self, microbatch))
        checksum = 0 if layout is None else layout.checksum
        due = self._expected.header(messages.DATA, checksum, 0, transfers.exchanges, self.count, microbatch, place)
        value, is_built = None, True
        if self._connection.foreign:
            is_built = layout is None  # Its tensors have yet to go to the device.
        elif layout is not None:
            is_built = layout.in_place
            value = layout.build(frame, [each.tensor for each in directs], self._device) if is_built else None
        return Pending(due, value, layout, frame, work, directs, before, is_built)

    def _receive(self, microbatch: int, layout: Layout | None) -> tuple[list[Transfer], Tensor, Any, Any]:
        """Start the receives of one message: large tensors, frame, what comes before the last, and what comes last."""
        carriers = [region.make_carrier() for region in (() if layout is None else layout.directs)]
        directs = [Transfer(memory, self._start(memory, microbatch)) for memory in carriers]
        frame = _frame_for(layout)
        before, work = None, self._start(frame, microbatch)
        if frame.numel() > WHOLE_BYTES:
            before, work = work, self._start(_END, microbatch)
        return directs, frame, before, work

    def _start(self, memory: Tensor, microbatch: int, tag: int | None = None) -> Any:
        tag = self._expected.tag if tag is None else tag
        return self._transfers.receive(memory, self._connection, tag, self.channel, microbatch)

    @uninterrupted
    def receive(self, microbatch: int) -> Any:
        connection, payload = self._connection, None
        with self._taking(microbatch):
            pending = self._arrive(microbatch)
            if pending.payload is not None and connection.link is not None:
                payload = connection.link.take(pending.payload)
        value = pending.value
        if pending.failure is None and not pending.is_built:
            assert pending.layout is not None
            octets = [transfer.tensor for transfer in pending.directs]
            value = pending.layout.build(pending.frame, octets, self._device, payload)
            if connection.foreign:
                value = arrive(value, None, self._device)
        self._forget(microbatch)
        if pending.failure is not None:
            raise pending.failure
        return value

    def discard(self, microbatch: int) -> PeerFailure | None:
        """Forget the message, but for the failure that it may be and for what it says of the layout."""
        link = self._connection.link
        with self._taking(microbatch):
            pending = self._arrive(microbatch)
            if pending.payload is not None and link is not None:
                try:
                    link.drop(pending.payload)
                except torch.OutOfMemoryError as error:
                    cause = f"{type(error).__name__}, even for what came after a failure: {error}"
                    lost = PeerFailure(self.channel.target_rank, cause, stage=self.channel.target_stage)
                    raise copy(self._transfers.watch.propose(lost)) from error
        self._forget(microbatch)
        return pending.failure

    def _taking(self, microbatch: int) -> AbstractContextManager[object]:
        """Return a context in which no other thread takes messages of the device's link, if there is one."""
        link = self._connection.link
        if link is None:
            return _NOTHING
        if not link.taking.acquire(blocking=False):  # A message is just being taken, unless its sender stands still.
            with self._transfers.waiting(self.channel.source_rank, self.channel, microbatch):
                link.taking.acquire()
        return _Released(link.taking)

    def _forget(self, microbatch: int) -> None:
        del self.posted[microbatch]
        self._arrived.pop(microbatch, None)

    def _arrive(self, microbatch: int) -> Pending:
        """Wait for a message, with all its parts that gloo brings, and prove that it is the due one.

        What a device's link brings comes in the order of the sends: so those that were posted before are taken first.
        A message that has come stays until it is a value: there may be no memory for that, and then it is discarded.
        """
        if microbatch not in self.posted:
            self.post(microbatch)
        arrived, link = self._arrived, self._connection.link
        if link is None:
            pending = arrived.get(microbatch) or self._take(microbatch, self._transfers.wait)
            if not pending.is_built:
                arrived[microbatch] = pending
            return pending
        while microbatch not in arrived:
            if link.error is not None:
                raise link.error
            link.receive_announced()  # Before a wait for more, for which the sender may have to come on.
            end, due = link.posted.popleft()
            end._arrived[due] = end._take(due, self._transfers.wait)
        return arrived[microbatch]

    def has_come(self, microbatch: int) -> bool:
        """Return whether the frame of a posted message is here, which was blank before."""
        pending = self.posted.get(microbatch)
        return pending is not None and ctypes.c_uint32.from_address(pending.frame.data_ptr()).value == messages.MAGIC

    def take_early(self, microbatch: int) -> None:
        """Take a message that has come, on another thread than the rank's own."""
        self._arrived[microbatch] = self._take(microbatch, self._transfers.wait_beside)

    def _take(self, microbatch: int, wait: Callable[..., None]) -> Pending:
        pending = self.posted[microbatch]
        # What comes last is waited for first (see `WHOLE_BYTES`): the thread then sleeps and wakes once. (And each work
        # only once: gloo would wait for a second arrival.)
        for work in (pending.work, pending.before, *(transfer.work for transfer in reversed(pending.directs))):
            if work is not None:
                wait(work, self.channel.source_rank, self.channel, microbatch)
        raw = ctypes.string_at(pending.frame.data_ptr(), HEADER_BYTES)  # torch's own ways cost four times as much
        layout = pending.layout
        if raw != pending.due or layout is None:
            header, due = read_header(raw), read_header(pending.due)
            fault = self._expected.fault_of(header, due)
            if fault is not None:
                expected = name_message(due.microbatch, due.ordinal, due.step)
                self._refuse(self._transfers.abort, due.microbatch, expected, fault)
            if header.kind == messages.FAILURE:
                body = self._follow(microbatch, header, wait)
                text = ctypes.string_at(body.data_ptr(), header.follows)
                return pending._replace(failure=failure_from(text, self.channel.source_rank))
            if header.kind == messages.CHANGED:
                layout, body = self._take_changed(microbatch, header, wait)
                pending = pending._replace(layout=layout.all_packed(), frame=body, directs=(), is_built=False)
            else:
                layout = self._expected.known[header.checksum]
                pending = pending._replace(layout=layout, directs=(), is_built=False)
            self._expected.layouts[header.ordinal] = layout
        if not layout.device_bytes:
            return pending
        link = self._connection.link
        if link is None:
            raise MessageError(
                f"{self.channel}: a message announces tensors on a device's link, of which there is none"
            )
        return pending._replace(payload=link.announce(layout, self.channel, microbatch))

    def _take_changed(self, microbatch: int, header: Header, wait: Callable[..., None]) -> tuple[Layout, Tensor]:
        """Return the layout that a message introduces, and all that it has but what is on a device's link."""
        body = self._follow(microbatch, header, wait)
        text_bytes = 0
        if header.follows >= HEADER_BYTES:
            text_bytes = read_header(ctypes.string_at(body.data_ptr(), HEADER_BYTES)).follows
        if not 0 < text_bytes <= header.follows - HEADER_BYTES:
            raise MessageError(
                f"{self.channel}: a message of {header.follows} bytes says that {text_bytes} of them are its layout"
            )
        text = ctypes.string_at(body.data_ptr() + header.follows - text_bytes, text_bytes)
        layout = self._book.get(text) or self._book.setdefault(text, Layout.load(text, is_known=has_secret()))
        self._expected.learn(layout)
        return layout, body

    def _follow(self, microbatch: int, header: Header, wait: Callable[..., None]) -> Tensor:
        tag = self._expected.following_tag(header.ordinal)
        body = torch.empty(header.follows, dtype=torch.uint8, device="cpu")
        works = [self._start(body, microbatch, tag)]
        if header.follows > WHOLE_BYTES:
            works.insert(0, self._start(_END, microbatch, tag))
        for work in works:
            wait(work, self.channel.source_rank, self.channel, microbatch)
        # The receipt: the sender posted its receive before it sent the body, so this wait is for nobody.
        receipt = self._transfers.send(_RECEIPT, self._connection, tag, self.channel, microbatch)
        wait(receipt, self.channel.source_rank, self.channel, microbatch)
        return body

    def end_step(self) -> None:
        super().end_step()
        self._coming = 0


def _frame_for(layout: Layout | None) -> Tensor:
    """Allocate a frame of that layout; without one, of the header that announces it. It begins with a blank."""
    frame = torch.empty(HEADER_BYTES if layout is None else layout.frame_bytes, dtype=torch.uint8, device="cpu")
    ctypes.memset(frame.data_ptr(), 0, ctypes.sizeof(ctypes.c_uint32))
    return frame


class _Released:
    """A context of a lock that is held already."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._lock.release()
