"""Single transfers on the wire, with what must be true of each: bounded, watched, and a named loss.

The backend is called below torch.distributed's functional layer (`ProcessGroup.send` and `recv`
on the backend itself), which saves about 10 us of Python for each message and takes ranks of the
group as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from penstock.errors import PeerFailure
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.distributed.device_link import DeviceLink
from penstock.runtime.transport.failure.blame import Waiting
from penstock.runtime.transport.failure.peer_failures import CONNECTION_CLOSED, after_loss
from penstock.runtime.transport.failure.silence import COMPILATIONS, LONGEST_SECONDS
from penstock.runtime.transport.failure.watch import Watch

SLACK_SECONDS = (
    10.0  # gloo's own timeout comes this much later than ours: it is the last resort, where the watch ends nothing
)

# For a message that its receiver takes soon: nothing but this ends such a wait.
SEND_SLACK_SECONDS = 4.0


class PeerConnection(NamedTuple):
    """A connection to another rank: a backend, and the number that the rank has in that.

    `link` carries tensors in one direction where both ranks have such a device; `foreign`: the other's is another.
    """

    rank: int
    backend: Any
    number: int
    link: DeviceLink | None = None
    foreign: bool = False


class BackendTransfers:
    """Starts transfers and waits for them. The number of exchanges so far is stamped on every message."""

    def __init__(self, rank: int, backend: Any, watch: Watch, timeout: float) -> None:
        self.rank = rank
        self.exchanges = 0  # Counts exchanges: with each, a step of the transport ends.
        self.backend = backend
        self.watch = watch
        self._now = watch.clock.now
        self.timeout = timeout
        # Gives way to gloo's threads, where they are held back.
        self.give_way: Callable[[], object] = lambda: None
        self._short = timedelta(seconds=timeout + SEND_SLACK_SECONDS)
        # As long as other ranks go on. That of devices' backends too: their own watchdog ends the process.
        self.longest = timedelta(seconds=timeout + SLACK_SECONDS + LONGEST_SECONDS)

    def check_not_broken(self) -> None:
        """Raise if the group is broken: it must not train on."""
        if self.watch.verdict is not None:
            raise after_loss(self.watch.verdict)

    def connection(self, peer: int) -> PeerConnection:
        """Return the connection to a rank that the process group has."""
        return PeerConnection(peer, self.backend, peer)

    @contextmanager
    def guard(self, peer: int, channel: Channel | None, microbatch: int) -> Iterator[None]:
        """Report an error of the device's link as the loss of the peer; memory that is full is nobody else's fault."""
        if self.watch.verdict is not None:
            raise after_loss(self.watch.verdict)
        try:
            yield
        except (PeerFailure, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            self._lose(
                error, self._waiting(peer, channel, microbatch), f"lost on the device's link ({first_line(error)})"
            )

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
            work.wait(self._short if is_short else self.longest)
        except RuntimeError as error:
            if isinstance(error, PeerFailure):
                raise
            self._lose(error, waiting)
        finally:
            watch.waiting = None

    def wait_beside(
        self, work: Any, peer: int, channel: Channel | None = None, microbatch: int = -1, is_short: bool = False
    ) -> None:
        """Wait on another thread than the rank's own, for what is here or about to be."""
        work.wait(self._short)

    @contextmanager
    def waiting(self, peer: int, channel: Channel, microbatch: int) -> Iterator[None]:
        """Surround a wait for what another thread of this rank takes from a peer; the watch sees for whom it is."""
        self.watch.waiting = self._waiting(peer, channel, microbatch)
        try:
            yield
        finally:
            self.watch.waiting = None

    def is_taken_soon(self, is_known: bool) -> bool:
        """Return whether the receiver of a message takes it within the timeout: unless it compiles before.

        It does so for what it has not seen before. (That dynamo is loaded means little: every optimizer loads it.)
        """
        return "torch._dynamo" not in sys.modules or (is_known and not COMPILATIONS.has_begun)

    def abort(self, failure: PeerFailure) -> None:
        """Make this the group's verdict, if there is none yet."""
        self.watch.propose(failure)

    def _waiting(self, peer: int, channel: Channel | None, microbatch: int) -> Waiting:
        return Waiting(peer, channel, microbatch, self._now())

    def _lose(self, error: RuntimeError, waiting: Waiting, cause: str = CONNECTION_CLOSED) -> NoReturn:
        """Raise the group's verdict on a failed operation."""
        self.watch.waiting = None
        if timed_out(error):
            cause = f"silent for {self.timeout:g} s"
        raise copy(self.watch.propose(self.watch.describe(waiting).blame(self.rank, cause))) from error


def timed_out(error: RuntimeError) -> bool:
    """Return whether gloo has given up a wait, and no connection was closed."""
    return "Timed out waiting" in str(error)


def first_line(error: RuntimeError) -> str:
    """Return the first line of an error's text."""
    return str(error).partition("\n")[0]
