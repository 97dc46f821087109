"""Ranks are processes: messages travel through torch.distributed.

Gloo offers little: messages of a tag between two ranks arrive in order; a message may be shorter than its receive, but
one that is longer aborts the *process* of the receiver; nothing can be polled; and a wait that times out closes all
connections. So the receiver must know the size beforehand, and no guess may ever be too small. Yet shapes may change.

The rule: the prediction for the k-th message of a channel in a step is the layout of the k-th message of that channel
in the step before (none: a header only). Both ends know it without talking, however early or late receives are posted,
because messages and posts of one channel pair up in order and the k-th message of the last step was taken before this
step began. So shapes that differ among microbatches but repeat every step are perfectly predicted. A message that looks
as predicted is one frame (and one message for each large tensor, into its final memory). Any other sends a header in
the place of the frame, a byte in the place of each large tensor, and then the layout with all bytes as one more message
whose size the header told. That both ends count alike is checked at the end of every step.

Tensors on a device travel by the group's backend for that device (`cpu:gloo,cuda:nccl`), if both ranks have such a
device: see `device_link`. What else is on a device goes through the CPU.

How the loss of a peer is found and told is in `watch`. While a wait is inside gloo, Python does not see Ctrl-C; it ends
at the latest after the timeout, and mostly sooner: a rank that was not blocked leaves, and its connections close.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import MessageError, PeerFailure, UsageError
from penstock.runtime.messages.clock import CLOCK, Clock
from penstock.runtime.transport.base import Transport, Where, nowhere
from penstock.runtime.transport.channel import Channel, ChannelEnds, check_channels
from penstock.runtime.transport.distributed.exchange import Exchange, Exchanged, Posted
from penstock.runtime.transport.distributed.incoming import DistributedIncoming
from penstock.runtime.transport.distributed.links import Links
from penstock.runtime.transport.distributed.member import Member, has_agent, member_of
from penstock.runtime.transport.distributed.messages import SUBTAGS
from penstock.runtime.transport.distributed.outgoing import DistributedOutgoing
from penstock.runtime.transport.distributed.transfers import BackendTransfers, PeerConnection
from penstock.runtime.transport.failure.blame import Waiting, different_calls
from penstock.runtime.transport.failure.own_state import held_weakly
from penstock.runtime.transport.failure.peer_failures import after_loss, stopped_by_force
from penstock.runtime.transport.failure.watch import Watch
from penstock.runtime.transport.handover import Rewritten
from penstock.runtime.transport.interrupts import uninterrupted
from penstock.runtime.transport.layout.layout import Book

CHANNELS = 0x1FFF  # The most in one program.
FIRST_TAG = 0x4000_0000  # far from what users choose; then 5 bits of transport, 13 of channel, 12 within the channel
CONTROL_TAG = CHANNELS * SUBTAGS  # The exchange and cutting use the tags after the last channel's.

_PROBE = torch.zeros(1, dtype=torch.uint8, device="cpu")

# Of transports that are gone: gloo reads no further from a peer where the memory of a receive that it has is gone.
_abandoned: list[list[tuple[torch.Tensor, Any]]] = []


class DistributedTransport(Transport):
    """One rank's transport over torch.distributed, on a process group (by default the world). Ranks are the group's.

    `device` is where values that were sent from a GPU arrive.
    """

    holds_interrupts = True
    max_sends = 4  # Messages of a channel that may be under way; some more where they are small.

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise UsageError("torch.distributed is not initialised; call init_process_group() or use ThreadTransport")
        group = group if group is not None else dist.group.WORLD
        assert group is not None
        if dist.get_rank(group) < 0:
            raise UsageError(f"rank {dist.get_rank()} is not in the group; make the transport on its members only")
        self._group = group
        self._set_up(member_of(group, timeout), timeout, device)

    def _set_up(
        self, member: Member, timeout: float, device: torch.device | str | None = None, clock: Clock = CLOCK
    ) -> None:
        """Set up everything that hangs on the group's backend and store, whatever these are."""
        self.rank, self.ranks = member.rank, member.ranks
        self.timeout, self.clock = timeout, clock
        self.device = None if device is None else torch.device(device)
        self._backend_name = member.backend_name
        self.number = member.number  # among the transports of the group
        self._tag = FIRST_TAG + member.number % 32 * (CHANNELS + 1) * SUBTAGS
        self._prefix = f"penstock/{member.number}"
        self._store = member.store
        seconds: dict[int, PeerConnection] = {}  # see `Links`
        close = partial(_close_connections, member.backend, seconds, self._tag + CONTROL_TAG)
        self.watch = Watch(
            *(member.store, member.store_host, self._prefix, self.rank, self.ranks, timeout, close, clock),
        )
        this = weakref.ref(self)
        self.watch.own.call = lambda: getattr(this(), "call", "")
        self.news = self.watch.news
        self.watch.own.traffic = partial(_traffic, this)  # not of this transport, which it would keep alive
        weakref.finalize(self, self.watch.stop)
        self._transfers = transfers = BackendTransfers(self.rank, member.backend, self.watch, timeout)
        tag = self._tag + CONTROL_TAG + 3
        self._links = Links(member, transfers, self._prefix, tag, self.device, seconds)
        self.watch.device_waiting, self.watch.abort_device = self._links.device_waiting, self._links.abort
        self.watch.is_closed = partial(_is_closed, member.backend, self._tag + CONTROL_TAG + 4)
        self.watch.free_device = self._links.free
        self._book = Book()
        self._exchanger = Exchange(self.rank, self.ranks, self._tag + CONTROL_TAG, transfers)
        weakref.finalize(self, _abandoned.append, self._exchanger.under_way)
        self.ends = ChannelEnds((), self.rank)
        self._opened: dict[tuple[Channel, ...], ChannelEnds] = {}
        self._next_channel = 0
        self._uncollected: Posted | None = None  # the exchange that was posted last

    @property
    def exchanges(self) -> int:
        return self._transfers.exchanges

    @property
    def broken(self) -> PeerFailure | None:
        return self.watch.verdict

    def check_not_broken(self) -> None:
        if self.watch.verdict is not None:
            raise after_loss(self.watch.verdict)

    def open(self, channels: Sequence[Channel]) -> None:
        self.check_not_broken()
        if channels is not self.ends.channels and tuple(channels) != self.ends.channels:
            self._open(channels)
        self._exchanger.prepare()

    def _open(self, channels: Sequence[Channel]) -> None:
        checked = check_channels(channels, self.ranks)
        self.ends.check_idle("open()")
        if len(checked) > CHANNELS:
            raise UsageError(f"{len(checked)} channels; one program may have {CHANNELS}")
        if checked not in self._opened:
            if self._next_channel + len(checked) > CHANNELS:
                self._next_channel = 0  # Wraps around: after so many programs, the first are long past.
            self._opened[checked] = self._make_ends(checked, self._tag + self._next_channel * SUBTAGS)
            self._next_channel += len(checked)
        self.ends = self._opened[checked]

    def _make_ends(self, channels: tuple[Channel, ...], tag: int) -> ChannelEnds:
        """Make the ends of these channels on this rank."""
        self._links.connect(channels)
        return ChannelEnds(
            channels, self.rank, partial(self._make_incoming, tag), partial(self._make_outgoing, tag, self.max_sends)
        )

    def _make_incoming(self, tag: int, number: int, channel: Channel) -> DistributedIncoming:
        place, connection = tag + number * SUBTAGS, self._links.to(channel, channel.source_rank)
        return DistributedIncoming(channel, place, self._transfers, connection, self._book, self.device)

    def _make_outgoing(self, tag: int, max_sends: int, number: int, channel: Channel) -> DistributedOutgoing:
        place, connection = tag + number * SUBTAGS, self._links.to(channel, channel.target_rank)
        return DistributedOutgoing(channel, place, self._transfers, connection, self._book, max_sends)

    def describe_link(self, source: int, target: int) -> str:
        return f"torch.distributed ({self._backend_name})"

    @uninterrupted
    def flush(self) -> None:
        every = (end for ends in self._opened.values() for end in ends.outgoing.values())
        found = [(end.channel.source_stage, microbatch) for end in every for microbatch in end.flush()]
        if self._links.devices:
            found += self._links.flush()
        if found:
            raise Rewritten(*found[0])

    def exchange(self, value: Any) -> list[Any]:
        self._check_may_exchange()
        try:
            posted = self._post(value)
            answers = self._collect(posted)
            self._end_step(posted.used)
        except KeyboardInterrupt as interrupt:  # It leaves half an exchange on the wires.
            stopped = stopped_by_force(self.rank)
            self.abort(stopped)
            raise interrupt from stopped
        return self._agreed(answers)

    def post_exchange(self, value: Any) -> Callable[[], list[Any]]:
        self._check_may_exchange()
        posted = self._post(value)
        self._end_step(posted.used)
        self._uncollected = posted
        return partial(self._collect_posted, posted)

    def _post(self, value: Any) -> Posted:
        used = list(self._opened.values())
        return self._exchanger.post(self._transfers.exchanges, self.ends, used, self.call, value)

    def _collect_posted(self, posted: Posted) -> list[Any]:
        """Return what all ranks reported, or raise the error that this was; once known, always the same."""
        if posted.error is not None:
            raise posted.error
        self.watch.own.collects = posted.step if posted.entry.call == self.call else None
        try:
            return self._agreed(self._collect(posted))
        except (MessageError, PeerFailure) as error:
            posted.error = error
            raise
        finally:
            self.watch.own.collects = None
            if posted is self._uncollected and (posted.found or posted.error):  # Otherwise Ctrl-C has ended the wait.
                self._uncollected = None

    def known_answers(self) -> list[Any] | None:
        found, posted = None, self._uncollected
        if posted is not None and self.broken is None:
            with suppress(MessageError, PeerFailure), self._leaving_no_disorder():  # Whoever collects finds it broken.
                found = self._exchanger.known(posted)
        return None if found is None else found.values

    def _check_may_exchange(self) -> None:
        if self._uncollected is not None:
            self._collect_posted(self._uncollected)
        self.check_not_broken()

    def _collect(self, posted: Posted) -> Exchanged:
        """Return what all ranks reported, unless their messages were not those of one program."""
        with self._leaving_no_disorder():
            answers = self._exchanger.collect(posted)
            apart = different_calls(answers.calls) if answers.fault is not None else None
            if answers.fault is not None and apart is None:
                raise MessageError(answers.fault)
        if apart is not None:
            self.abort(apart)  # messages are left on the wires
            raise copy(apart)
        return answers

    @contextmanager
    def _leaving_no_disorder(self) -> Iterator[None]:
        """Make all ranks give up where messages are not those of one program."""
        try:
            yield
        except MessageError as error:
            self.abort(PeerFailure(self.rank, f"MessageError: {error}"))
            raise

    def _end_step(self, used: Sequence[ChannelEnds]) -> None:
        self._transfers.exchanges += 1
        self.watch.end_step()
        for ends in used:
            ends.end_step()
        if self._links.devices:
            self._links.end_step()

    def _agreed(self, answers: Exchanged) -> list[Any]:
        if len(set(answers.calls)) > 1 and (apart := different_calls(answers.calls)) is not None:
            raise apart
        return answers.values

    def name_axes(self, **axes: int) -> None:
        """Name which of several pipelines this is: failures here are named with `replica` and `shard`."""
        self.watch.axes = axes

    def name_far_host(self, failure: PeerFailure) -> None:
        """Set the failure to raise where the store is gone, which another group's process had."""
        if 0 not in dist.get_process_group_ranks(self._group) and not has_agent():
            self.watch.store_host.far = failure

    def describe_by(self, doing: Callable[[], str], where: Where = nowhere) -> None:
        self.watch.own.doing, self.watch.own.where = held_weakly(doing, "gone"), held_weakly(where, None)

    def announce(self, failure: PeerFailure) -> None:
        self.watch.announce(failure)

    def abort(self, failure: PeerFailure) -> None:
        self.watch.propose(failure)

    @contextmanager
    def in_other_group(self, leave: Callable[[PeerFailure], None]) -> Iterator[None]:
        """Surround waits for ranks of another group; `leave` ends them, if this group is lost meanwhile."""
        before, self.watch.leave_other_group = self.watch.leave_other_group, leave
        try:
            if self.watch.verdict is not None:
                leave(self.watch.verdict)
            yield
        finally:
            self.watch.leave_other_group = before

    def reset(self) -> None:
        """Do nothing after a drained step: predictions hold as long as both ends keep them. A loss is not forgotten."""
        self.check_not_broken()
        self.ends.check_idle("reset()")
        self.flush()

    def close(self) -> None:
        self._links.settle()
        self.watch.close()
        self._opened.clear()
        self._links.free()
        self._book.clear()
        self.ends = ChannelEnds((), self.rank)


def _traffic(
    transport: weakref.ref[DistributedTransport], waiting: Waiting | None
) -> tuple[dict[int, int], tuple[int, int] | None]:
    """Return how many messages of each channel a rank has sent in this step; and which one it waits for."""
    found = transport()
    if found is None:
        return {}, None
    awaited = None if waiting is None or waiting.edge is None else found.ends.awaited(waiting.edge, waiting.microbatch)
    return {index: end.count for index, end in found.ends.outgoing.items() if end.count}, awaited


def _is_closed(backend: Any, tag: int, peer: int) -> bool:
    """Return whether the connection to a rank is closed: gloo then refuses a send, and nobody receives one."""
    try:
        backend.send([_PROBE], peer, tag)
    except RuntimeError:
        return True
    return False


def _close_connections(backend: Any, seconds: Mapping[int, PeerConnection], tag: int, peer: int) -> None:
    """Close all connections of this rank by a receive that times out, and so free its main thread."""
    for each in (PeerConnection(peer, backend, peer), *list(seconds.values())):
        with suppress(RuntimeError):
            each.backend.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], each.number, tag + 1).wait(
                timedelta(milliseconds=1)
            )
