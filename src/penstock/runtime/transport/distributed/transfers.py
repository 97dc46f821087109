"""Single transfers on the wire, with what must be true of each: bounded, watched, and a named loss.

The backend is called below torch.distributed's functional layer (`ProcessGroup.send` and `recv`
on the backend itself), which saves about 10 us of Python for each message and takes ranks of the
group as they are.

Between two ranks gloo has one connection for both directions. Its thread may read from it only while the main thread
does not write to it, and polls until it may: where both cores are busy, that takes longer than all else that a small
message needs. So values in one direction have a second connection (`connect_again`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from penstock.errors import PeerFailure
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.compiling import LONGEST_SECONDS, has_compiled
from penstock.runtime.transport.distributed.messages import Transfer
from penstock.runtime.transport.failure.blame import Waiting
from penstock.runtime.transport.failure.peer_failures import CONNECTION_CLOSED, after_loss
from penstock.runtime.transport.failure.watch import Watch
from penstock.runtime.transport.forks import keep_in_forks
from penstock.runtime.transport.interrupts import uninterrupted

SLACK_SECONDS = (
    10.0  # gloo's own timeout comes this much later than ours: it is the last resort, where the watch ends nothing
)

SEND_SLACK_SECONDS = 4.0  # for a message that its receiver takes soon: nothing but this ends such a wait

GOODBYE_TIME = timedelta(seconds=1)  # in which the end of a peer's process closes its connections

_HERE = torch.ones(1, dtype=torch.uint8)


class PeerConnection(NamedTuple):
    """A connection to another rank: a backend, and the number that the rank has in that."""

    rank: int
    backend: Any
    number: int


class BackendTransfers:
    """Starts transfers and waits for them. The number of exchanges so far is stamped on every message."""

    def __init__(self, rank: int, backend: Any, device_backend: Any, watch: Watch, timeout: float) -> None:
        self.rank = rank
        self.exchanges = 0  # so far: with each, a step of the transport ends
        self.backend = backend
        self.device_backend = device_backend
        self.watch = watch
        self._now = watch.clock.now
        self._timeout = timeout
        self.give_way: Callable[[], object] = lambda: None  # to gloo's threads, where they are held back
        self._short = timedelta(seconds=timeout + SEND_SLACK_SECONDS)
        self._of_a_receive = timedelta(
            seconds=timeout + SLACK_SECONDS + LONGEST_SECONDS
        )  # as long as other ranks go on

    def check_not_broken(self) -> None:
        """A broken group must not train on."""
        if self.watch.verdict is not None:
            raise after_loss(self.watch.verdict)

    def travels_by_device(self, device: str) -> bool:
        """Whether tensors of this type of device have a link of their own."""
        return device != "cpu" and self.device_backend is not None

    def connection(self, peer: int) -> PeerConnection:
        """The connection to a rank that the process group has."""
        return PeerConnection(peer, self.backend, peer)

    @uninterrupted
    def connect_again(self, peer: int, store: Any, prefix: str, tag: int) -> PeerConnection:
        """A second connection to a rank, which makes one at the same time.

        Gloo connects ranks in one call that nothing ends but its timeout; so first each waits for the other in a way
        that the watch can end.
        """
        first, note = self.connection(peer), torch.zeros(1, dtype=torch.uint8)
        with self.watch.own.connecting("for their second connection"):
            works = [self.receive(note, first, tag), self.send(_HERE, first, tag)]
            for work in works:
                self.wait(work, peer)
        low, high = sorted((self.rank, peer))
        begun = self._now()
        try:
            meeting = PrefixStore(f"{prefix}/{low}-{high}", store.clone())  # which leaves the watch's own store free
            backend = dist.ProcessGroupGloo(meeting, int(self.rank == high), 2, timedelta(seconds=self._timeout))
        except dist.DistNetworkError as error:
            raise self.watch.without_store(error) from error
        except RuntimeError as error:
            lost = PeerFailure(peer, f"did not connect to rank {self.rank} within {self._timeout:g} s")
            if self._now() - begun < self._timeout / 2:  # so nobody was waited for
                lost = self._not_connected(first, tag, error)
            raise copy(self.watch.propose(lost)) from error
        return PeerConnection(peer, keep_in_forks(backend), int(peer == high))

    def _not_connected(self, first: PeerConnection, tag: int, error: RuntimeError) -> PeerFailure:
        """Whose fault it is that a second connection could not be made: the peer's, if its first one is closed."""
        peer = first.rank
        try:
            first.backend.recv([torch.zeros(1, dtype=torch.uint8)], first.number, tag).wait(GOODBYE_TIME)
        except RuntimeError as closed:
            if not _timed_out(closed):
                cause = f"{CONNECTION_CLOSED} while rank {self.rank} waited for their second connection"
                return PeerFailure(peer, cause)
        return PeerFailure(self.rank, f"could not connect to rank {peer}: {str(error).splitlines()[0]}")

    def send(
        self, tensor: Tensor, to: PeerConnection, tag: int, channel: Channel | None = None, microbatch: int = -1
    ) -> Any:
        try:
            return to.backend.send([tensor], to.number, tag)
        except RuntimeError as error:
            self._lose(error, self._waiting(to.rank, channel, microbatch))

    def receive(
        self, tensor: Tensor, by: PeerConnection, tag: int, channel: Channel | None = None, microbatch: int = -1
    ) -> Any:
        try:
            return by.backend.recv([tensor], by.number, tag)
        except RuntimeError as error:
            self._lose(error, self._waiting(by.rank, channel, microbatch))

    def send_tensor(self, tensor: Tensor, to: PeerConnection, tag: int, channel: Channel, microbatch: int) -> Transfer:
        """Bytes that travel by themselves."""
        if self.travels_by_device(tensor.device.type):
            return Transfer(tensor, self.device_backend.send([tensor], to.rank, 0), True)
        tensor = tensor.cpu()
        return Transfer(tensor, self.send(tensor, to, tag, channel, microbatch), False)

    def receive_tensor(
        self, tensor: Tensor, by: PeerConnection, tag: int, channel: Channel, microbatch: int
    ) -> Transfer:
        """Into memory for bytes that travel by themselves."""
        if self.travels_by_device(tensor.device.type):
            return Transfer(tensor, self.device_backend.recv([tensor], by.rank, 0), True)
        return Transfer(tensor, self.receive(tensor, by, tag, channel, microbatch), False)

    def wait(
        self, work: Any, peer: int, channel: Channel | None = None, microbatch: int = -1, is_short: bool = False
    ) -> None:
        """Wait for one operation; the watch sees for whom, and ends the wait if that is hopeless.

        The watch cannot end the wait for what has begun to come, or to leave (`is_short`); gloo's own limit then is
        some seconds after ours, by which time the watch has mostly found out who is silent.
        """
        watch = self.watch
        watch.waiting = waiting = self._waiting(peer, channel, microbatch)
        try:
            if watch.verdict is not None:
                raise after_loss(watch.verdict)
            work.wait(self._short if is_short else self._of_a_receive)
        except RuntimeError as error:
            if isinstance(error, PeerFailure):
                raise
            self._lose(error, waiting)
        finally:
            watch.waiting = None

    def finish(
        self, transfer: Transfer, peer: int, channel: Channel | None, microbatch: int, is_short: bool = False
    ) -> None:
        if transfer.on_device:
            transfer.work.wait()  # makes the stream wait, not this thread (not run here: no GPU)
        else:
            self.wait(transfer.work, peer, channel, microbatch, is_short)

    def is_taken_soon(self, is_known: bool) -> bool:
        """Whether the receiver of a message takes it within the timeout: unless it compiles before.

        It does so for what it has not seen before. (That dynamo is loaded means little: every optimizer loads it.)
        """
        return "torch._dynamo" not in sys.modules or (is_known and not has_compiled())

    def abort(self, failure: PeerFailure) -> None:
        """Make this the group's verdict, if there is none yet."""
        self.watch.propose(failure)

    def _waiting(self, peer: int, channel: Channel | None, microbatch: int) -> Waiting:
        return Waiting(peer, channel, microbatch, self._now(), self.watch.own.reason if channel is None else "")

    def _lose(self, error: RuntimeError, waiting: Waiting) -> NoReturn:
        """The group's verdict on a failed operation."""
        self.watch.waiting = None
        cause = f"silent for {self._timeout:g} s" if _timed_out(error) else CONNECTION_CLOSED
        raise copy(self.watch.propose(waiting.blame(self.rank, cause))) from error


def _timed_out(error: RuntimeError) -> bool:
    """Whether gloo has given up a wait, and no connection was closed."""
    return "Timed out waiting" in str(error)
