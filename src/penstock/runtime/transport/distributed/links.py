"""The connections of a rank beyond those of its process group: one for each direction that needs it.

Devices need it because they run what is queued in order (`device_link`). Of gloo, one thread may read from a connection
only while the main thread does not write to it, and polls until it may: where both cores are busy, that takes longer
than all else that a small message needs. So values to a lower rank have a connection of their own.

Backends connect two ranks in calls that nothing ends but their timeout, and that name nobody. So two ranks first meet
by the connection that the group has, in a way that the watch can end; all ranks go through their pairs in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from penstock.devices import identity
from penstock.errors import PeerFailure, UsageError
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.distributed.device_link import DeviceLink, make_backend
from penstock.runtime.transport.distributed.member import Member, hold_back_loop_threads
from penstock.runtime.transport.distributed.transfers import (
    SLACK_SECONDS,
    BackendTransfers,
    PeerConnection,
    first_line,
    timed_out,
)
from penstock.runtime.transport.failure.blame import Waiting
from penstock.runtime.transport.failure.peer_failures import CONNECTION_CLOSED, after_loss
from penstock.runtime.transport.forks import keep_in_forks
from penstock.runtime.transport.interrupts import uninterrupted

# The end of a peer's process closes its connections within this time.
GOODBYE_TIME = timedelta(seconds=1)
NOTE_BYTES = 64  # what two ranks tell each other when they meet
LOOK_SECONDS = 0.001  # Between two looks at whether a device has connected.
EARLY_SECONDS = 0.02  # Between two looks at whether messages have come that this rank is not ready for.


class Links:
    """All of them. `seconds` (by rank) are gloo's, `devices` (by source and target) carry what is on a device."""

    def __init__(
        self,
        member: Member,
        transfers: BackendTransfers,
        prefix: str,
        tag: int,
        device: torch.device | None,
        seconds: dict[int, PeerConnection],
    ) -> None:
        self.seconds = seconds
        self.devices: dict[tuple[int, int], DeviceLink] = {}
        # By rank that was met: the type of its device.
        self._homes: dict[int, str] = {}
        self._home = "cpu" if device is None else device.type
        self._member, self._transfers, self._watch = member, transfers, transfers.watch
        self._rank, self._timeout, self._now = member.rank, transfers.timeout, transfers.watch.clock.now
        self._prefix, self._tag, self._device = prefix, tag, device
        self._early: Any = None  # takes messages while this rank's own thread is held up
        self._is_free = False

    def to(self, channel: Channel, peer: int) -> PeerConnection:
        """Return the connection of a channel to its other end."""
        second = self.seconds.get(peer) if channel.source_rank > channel.target_rank else None
        return (second or self._transfers.connection(peer))._replace(
            link=self.devices.get((channel.source_rank, channel.target_rank)),
            foreign=self._home != "cpu" and self._homes.get(peer, self._home) != self._home,
        )

    def connect(self, channels: Sequence[Channel], without: Collection[int] = ()) -> None:
        """Connect once more where these channels need it; gloo does not serve those to the ranks of `without`."""
        gloo = dist.is_gloo_available() and isinstance(self._transfers.backend, dist.ProcessGroupGloo)
        routes = sorted({(each.source_rank, each.target_rank) for each in channels})
        served = [pair for pair in routes if self._rank in pair]
        for peer in sorted({rank for pair in served for rank in pair} - {self._rank}):
            low, high = pair = min(self._rank, peer), max(self._rank, peer)
            second = gloo and (high, low) in served and peer not in without and peer not in self.seconds
            missing = [each for each in served if peer in each and each not in self.devices]
            if second or (missing and self._member.kinds and (peer not in self._homes or self._is_alike(peer))):
                self._homes[peer] = self._meet(peer)
            if second:
                limit = timedelta(seconds=self._timeout)
                backend = self._make(peer, "second", pair, partial(make_backend, "gloo", timeout=limit))
                self.seconds[peer] = PeerConnection(peer, backend, pair.index(peer))
            for route in missing if self._is_alike(peer) else ():
                self.devices[route] = self._make_device_link(peer, route)
                if route[1] == self._rank and self._early is None:
                    self._early = self._watch.clock.worker(self._take_early, f"penstock-early-{self._rank}")
                    self._early.start()
        if gloo and {rank for pair in served for rank in pair}.difference(without, {self._rank}):
            self._transfers.give_way = hold_back_loop_threads() or self._transfers.give_way

    def _is_alike(self, peer: int) -> bool:
        """Return whether the peer has a device of this rank's type, and the group a backend for it."""
        return self._homes.get(peer) == self._home and self._home in self._member.kinds

    @uninterrupted
    def _meet(self, peer: int) -> str:
        """Wait for a rank that does this too; returns the type of its device, which must be another one than ours."""
        first, theirs = self._transfers.connection(peer), torch.zeros(NOTE_BYTES, dtype=torch.uint8, device="cpu")
        place = self._home if self._device is None or self._home == "cpu" else f"{self._home} {identity(self._device)}"
        mine = torch.frombuffer(bytearray(place.encode().ljust(NOTE_BYTES)), dtype=torch.uint8)
        with self._watch.own.connecting("for their second connection"):
            works = [self._transfers.receive(theirs, first, self._tag), self._transfers.send(mine, first, self._tag)]
            for work in works:
                self._transfers.wait(work, peer)
        found = bytes(theirs.tolist()).rstrip().decode()
        if found == place != "cpu":
            raise UsageError(
                f"ranks {min(self._rank, peer)} and {max(self._rank, peer)} both compute on {self._device} of this "
                f"host, and {self._member.kinds[self._home]} connects no device with itself; leave the model on the "
                f"CPU and devices= out, or give each process a device of its own"
            )
        return found.partition(" ")[0]

    @uninterrupted
    def _make(self, peer: int, what: str, ends: tuple[int, int], make: Callable[..., Any]) -> Any:
        """Make a backend of this rank and one that does the same now; returns it."""
        begun = self._now()
        try:
            # The store is another connection to it, which leaves the watch's own free.
            name = f"{self._prefix}/{what}/{ends[0]}-{ends[1]}"
            place = PrefixStore(name, self._member.store.clone())
            ranks = [self._member.world[end] for end in ends]
            return keep_in_forks(make(store=place, number=ends.index(self._rank), name=name, ranks=ranks))
        except dist.DistNetworkError as error:
            raise self._watch.without_store(error) from error
        except RuntimeError as error:
            lost = PeerFailure(peer, f"did not connect to rank {self._rank} within {self._timeout:g} s")
            if self._now() - begun < self._timeout / 2:  # Nobody was waited for.
                lost = self._not_connected(peer, error)
            raise copy(self._watch.propose(lost)) from error

    def _not_connected(self, peer: int, error: RuntimeError) -> PeerFailure:
        """Decide whose fault it is that a connection could not be made: the peer's, if its first one is closed."""
        first = self._transfers.connection(peer)
        try:
            first.backend.recv([torch.zeros(1, dtype=torch.uint8, device="cpu")], first.number, self._tag).wait(
                GOODBYE_TIME
            )
        except RuntimeError as closed:
            if not timed_out(closed):
                cause = f"{CONNECTION_CLOSED} while rank {self._rank} waited for their second connection"
                return PeerFailure(peer, cause)
        return PeerFailure(self._rank, f"could not connect to rank {peer}: {first_line(error)}")

    def _make_device_link(self, peer: int, route: tuple[int, int]) -> DeviceLink:
        """Make a communicator that has moved its first bytes: it connects now, and not in the middle of a step."""
        assert self._device is not None
        transfers, watch, number = self._transfers, self._watch, route.index(self._rank)
        kind = partial(make_backend, self._member.kinds[self._home], timeout=transfers.longest)
        backend = self._make(peer, self._home, route, kind)
        memory = torch.zeros(NOTE_BYTES, dtype=torch.uint8, device=self._device)
        try:
            with watch.own.connecting("for their second connection"), transfers.guard(peer, None, -1):
                watch.waiting = waiting = Waiting(peer, None, -1, self._now(), watch.own.reason)
                work = backend.recv([memory], 0, 0) if number else backend.send([memory], 1, 0)
                while not work.is_completed():
                    if watch.verdict is not None:
                        raise after_loss(watch.verdict)
                    if self._now() - waiting.since > self._timeout + SLACK_SECONDS:
                        raise copy(watch.propose(waiting.blame(self._rank, f"silent for {self._timeout:g} s")))
                    watch.clock.sleep(LOOK_SECONDS)
        finally:
            watch.waiting = None
        return DeviceLink(backend, peer, number, self._device, transfers.guard, self._now)

    def flush(self) -> list[tuple[int, int]]:
        """See `DeviceLink.flush`; returns stages and microbatches whose memory was written to."""
        return [(channel.source_stage, number) for link in self.devices.values() for channel, number in link.flush()]

    def end_step(self) -> None:
        """Forget what a failed step needed."""
        for link in self.devices.values():
            link.end_step()

    def settle(self) -> None:
        """Wait until the device has moved what is under way: it may be far behind its host."""
        until = self._now() + self._timeout
        while self._watch.verdict is None and self.device_waiting() is not None and self._now() < until:
            self._watch.clock.sleep(LOOK_SECONDS)

    def _take_early(self) -> None:
        while not self._is_free:
            self._watch.clock.sleep(EARLY_SECONDS)
            for link in list(self.devices.values()):
                link.catch_up()

    # -- from the thread of the watch

    def free(self) -> None:
        """End all connections; what is still under way on the device has lost its peer."""
        self._is_free = True
        self.seconds.clear()
        while self.devices:
            with suppress(KeyError):  # the main thread, which closes its transport, does this as well
                self.devices.popitem()[1].close()

    def device_waiting(self) -> Waiting | None:
        """Return what the device of this rank waits for, and since when."""
        waits = [found for link in list(self.devices.values()) if (found := link.waiting()) is not None]
        return min(waits, key=lambda waiting: waiting.since, default=None)

    def abort(self) -> None:
        """End kernels that wait for a peer."""
        for link in list(self.devices.values()):
            link.abort()
