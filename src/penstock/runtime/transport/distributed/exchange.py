"""The exchange that ends a step: each rank's value to every rank, through one coordinator.

A star of point-to-point messages and not a collective: whoever waits here waits for one named rank, so a dead one is
seen at once and by name, and nothing is left half done. Between ranks of one host it goes by their socket, where a
wake-up costs a tenth of gloo's. Each rank also says how many messages it sent and took on each channel; where these
differ, the ranks ran different programs, and all are told before that could pair messages of different steps.

A rank may post its value and collect the answers later (`post`, `collect`), with messages of a further step in between.
The coordinator answers when it collects, so it is the rank that the others wait for anyway: rank 0, without which no
other can begin a step. It is mostly the last to end one, and then it may know at once what all have said, and answers
at once (`known`). Ctrl-C may end a wait there, with nothing lost: `collect` is then called again.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import MessageError
from penstock.runtime.messages import plain
from penstock.runtime.transport.channel import ChannelEnds
from penstock.runtime.transport.distributed.transfers import BackendTransfers
from penstock.runtime.transport.interrupts import uninterrupted

COORDINATOR = 0
FRAME_BYTES = 16 * 1024  # the entries of some dozens of ranks: what fits is taken without the receiver's help
_HEAD = struct.Struct("<IIQQ")  # magic, spare, number of the exchange, bytes of the body
_MAGIC = 0x53544152
_ROOM = FRAME_BYTES - _HEAD.size
Summary = tuple[str | None, list[str], list[bytes]]  # In what programs differ, if in anything; calls; values.
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class ExchangeEntry(NamedTuple):
    """What one rank says."""

    channels_checksum: int  # of the channels that it has open
    counts: dict[
        int, dict[int, int]
    ]  # By checksum and number of a channel: the messages that this end of it has moved.
    call: str
    value: bytes


class Exchanged(NamedTuple):
    """What an exchange has found: every rank's call and value, and in what their programs differ, if in anything."""

    calls: list[str]
    values: list[Any]
    fault: str | None


@dataclass
class Posted:
    """An exchange in which this rank has said what it has to, and has not heard the others yet."""

    step: int
    used: Sequence[ChannelEnds]
    value: Any
    entry: ExchangeEntry
    receives: dict[int, tuple[Tensor, Any]]  # Indexed by peer.
    heard: dict[int, ExchangeEntry]  # What the coordinator has received so far: a wait for the others may be left.
    sends: list[tuple[Tensor, Any]]  # Their tensors must live until they have left.
    found: Exchanged | None = None  # what all have said, once that is known
    error: Exception | None = None  # What came of it instead.


class Exchange:
    """One rank's part in the exchanges of its group."""

    sockets: Any = ()  # To ranks on this host, see `Connections`.

    def __init__(self, rank: int, ranks: int, tag: int, transfers: BackendTransfers) -> None:
        self.rank, self.ranks = rank, ranks
        self._peers = [COORDINATOR] if rank != COORDINATOR else [each for each in range(ranks) if each != rank]
        self._tag, self._long_tag = tag, tag + 2  # the number between them is for cutting connections
        self._transfers = transfers
        self._connections = {peer: transfers.connection(peer) for peer in self._peers}
        self._prepared: dict[int, tuple[Tensor, Any]] = {}
        self.under_way: list[tuple[Tensor, Any]] = []  # what may not have moved yet

    @uninterrupted
    def prepare(self) -> None:
        """Post the receives of the next exchange: called when the step begins that ends with it.

        Gloo sends nothing before it has heard that the receive is posted. A receive that is posted at the end of the
        step lets the report of a rank on another host wait for one more way there and back.
        """
        for peer in self._peers:
            if peer not in self._prepared:
                self._prepared[peer] = self._post(peer)
                self.under_way.append(self._prepared[peer])

    @uninterrupted
    def post(self, step: int, current: ChannelEnds, used: Sequence[ChannelEnds], call: str, value: Any) -> Posted:
        """Send this rank's report without waiting for anybody. `call` is what its user has called."""
        counts = {ends.channels_checksum: ends.counts() for ends in used}
        entry = ExchangeEntry(current.channels_checksum, counts, call, plain.dumps(value))
        self.prepare()
        receives, self._prepared = self._prepared, {}
        sends = [] if self.rank == COORDINATOR else self._put(COORDINATOR, step, plain.dumps([*entry]))
        self.under_way += sends
        return Posted(step, used, value, entry, receives, {self.rank: entry}, sends)

    def known(self, posted: Posted) -> Exchanged | None:
        """Return every rank's report, if this is the coordinator, all are here, and programs and calls are the same.

        Waits for nobody. Of a receive that gloo has, nobody can tell whether it is done without waiting for it.
        """
        if self.rank != COORDINATOR:
            return None
        for rank, (frame, work) in posted.receives.items():
            if rank not in posted.heard:
                if work is not None or not self.sockets.has_exchange(rank, posted.step):
                    return None
                self._hear(posted, rank, frame, work)
        summary = self._sum_up(posted)
        fault, calls, _ = summary
        return None if fault is not None or len(set(calls)) > 1 else self.collect(posted, summary)

    def collect(self, posted: Posted, summary: Summary | None = None) -> Exchanged:
        """Return what every rank has said; `summary` is that of the coordinator, where it is made already."""
        if posted.found is not None:
            return posted.found
        if self.rank == COORDINATOR:
            for rank, (frame, work) in posted.receives.items():
                if rank not in posted.heard:
                    self._hear(posted, rank, frame, work)
            fault, calls, values = summary or self._sum_up(posted)
            self._answer(posted, plain.dumps((fault, calls, values)))
        else:
            answer = self._get(COORDINATOR, posted.step, *posted.receives[COORDINATOR])
            self._wait(COORDINATOR, posted.sends)
            fault, calls, values = self._read(COORDINATOR, answer)
        found = [posted.value if rank == self.rank else self._read(rank, values[rank]) for rank in range(self.ranks)]
        posted.found = Exchanged(calls, found, fault)
        self.under_way[:] = self._prepared.values()
        return posted.found

    def _sum_up(self, posted: Posted) -> Summary:
        told = [posted.heard[rank] for rank in range(self.ranks)]
        return compare(told, posted.used), [each.call for each in told], [each.value for each in told]

    @uninterrupted
    def _hear(self, posted: Posted, rank: int, frame: Tensor, work: Any) -> None:
        posted.heard[rank] = ExchangeEntry(*self._read(rank, self._get(rank, posted.step, frame, work)))

    @uninterrupted
    def _answer(self, posted: Posted, packed: bytes) -> None:
        sends = {rank: self._put(rank, posted.step, packed) for rank in posted.receives}
        for rank, works in sends.items():
            self._wait(rank, works)

    def _read(self, peer: int, content: bytes) -> Any:
        try:
            return plain.loads(content)
        except plain.NotPlainError as error:
            raise MessageError(f"the report of rank {peer} at the end of a step cannot be read: {error}") from error

    def _post(self, peer: int) -> tuple[Tensor, Any]:
        if peer in self.sockets:
            return _NOTHING, None
        frame = torch.empty(FRAME_BYTES, dtype=torch.uint8, device="cpu")
        return frame, self._transfers.receive(frame, self._connections[peer], self._tag)

    def _put(self, peer: int, step: int, body: bytes) -> list[tuple[Tensor, Any]]:
        if peer in self.sockets:
            self.sockets.put_exchange(peer, step, body)
            return []
        head = _HEAD.pack(_MAGIC, 0, step, len(body))
        works = [self._start(head + (body if len(body) <= _ROOM else b""), peer, self._tag)]
        if len(body) > _ROOM:
            works.append(self._start(body, peer, self._long_tag))
        return works

    def _wait(self, peer: int, works: Sequence[tuple[Tensor, Any]]) -> None:
        for _, work in works:
            self._transfers.wait(work, peer)

    def _start(self, content: bytes, peer: int, tag: int) -> tuple[Tensor, Any]:
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return tensor, self._transfers.send(tensor, self._connections[peer], tag)

    def _get(self, peer: int, step: int, frame: Tensor, work: Any) -> bytes:
        if work is None:
            body: bytes
            its_step, body = self.sockets.get_exchange(peer)
            if its_step != step:
                raise MessageError(self._other_step(peer, step, its_step))
            return body
        self._transfers.wait(work, peer)
        magic, _, its_step, size = _HEAD.unpack(ctypes.string_at(frame.data_ptr(), _HEAD.size))
        if magic != _MAGIC or its_step != step:
            raise MessageError(self._other_step(peer, step, its_step))
        if size > plain.MESSAGE_BYTES:
            raise MessageError(
                f"rank {peer} announces a report of {size} bytes; at most {plain.MESSAGE_BYTES} are read"
            )
        if size <= _ROOM:
            return ctypes.string_at(frame.data_ptr() + _HEAD.size, size)
        rest = torch.empty(size, dtype=torch.uint8, device="cpu")
        work = self._transfers.receive(rest, self._connections[peer], self._long_tag)
        self._transfers.wait(work, peer, is_short=True)
        return ctypes.string_at(rest.data_ptr(), size)

    def _other_step(self, peer: int, step: int, its_step: int) -> str:
        return (
            f"rank {self.rank} is in its exchange number {step}, counted from 0, but rank {peer} in number {its_step}; "
            f"all ranks must make the same calls"
        )


def compare(entries: Sequence[ExchangeEntry], used: Sequence[ChannelEnds]) -> str | None:
    """Describe what the ranks disagree on, or return None."""
    odd = [rank for rank, entry in enumerate(entries) if entry.channels_checksum != entries[0].channels_checksum]
    if odd:
        return f"ranks {odd} have other channels open than rank 0; open() the same on all"
    faults = []
    for ends in used:
        counts = [entry.counts.get(ends.channels_checksum, {}) for entry in entries]
        for index, channel in enumerate(ends.channels):
            sent = counts[channel.source_rank].get(index, 0)
            taken = counts[channel.target_rank].get(index, 0)
            if sent != taken:
                pair = f"rank {channel.source_rank} sent {sent} and rank {channel.target_rank} took {taken}"
                faults.append(f"on channel {channel}, {pair}")
    return "; ".join(["the ranks ran different programs", *faults]) if faults else None
