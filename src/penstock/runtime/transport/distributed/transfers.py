"""Single transfers on the wire, with what must be true of each: bounded, watched, and a named loss.

The backend is called below torch.distributed's functional layer (`ProcessGroup.send` and `recv`
on the backend itself), which saves about 10 us of Python for each message and takes ranks of the
group as they are.
"""

from __future__ import annotations

import sys
from copy import copy
from datetime import timedelta
from typing import Any, NoReturn

from torch import Tensor

from penstock.errors import PeerFailure
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.compiling import LONGEST_SECONDS, has_compiled
from penstock.runtime.transport.distributed.messages import Transfer
from penstock.runtime.transport.failure.blame import Waiting
from penstock.runtime.transport.failure.peer_failures import CONNECTION_CLOSED, after_loss
from penstock.runtime.transport.failure.watch import Watch

SLACK_SECONDS = (
    10.0  # gloo's own timeout comes this much later than ours: it is the last resort, where the watch ends nothing
)


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
        self._short = timedelta(seconds=timeout + SLACK_SECONDS)
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

    def send(self, tensor: Tensor, peer: int, tag: int, channel: Channel | None = None, microbatch: int = -1) -> Any:
        try:
            return self.backend.send([tensor], peer, tag)
        except RuntimeError as error:
            self._lose(error, Waiting(peer, channel, microbatch, self._now()))

    def receive(self, tensor: Tensor, peer: int, tag: int, channel: Channel | None = None, microbatch: int = -1) -> Any:
        try:
            return self.backend.recv([tensor], peer, tag)
        except RuntimeError as error:
            self._lose(error, Waiting(peer, channel, microbatch, self._now()))

    def send_tensor(self, tensor: Tensor, tag: int, channel: Channel, microbatch: int) -> Transfer:
        """Bytes that travel by themselves."""
        if self.travels_by_device(tensor.device.type):
            return Transfer(tensor, self.device_backend.send([tensor], channel.target_rank, 0), True)
        tensor = tensor.cpu()
        return Transfer(tensor, self.send(tensor, channel.target_rank, tag, channel, microbatch), False)

    def receive_tensor(self, tensor: Tensor, tag: int, channel: Channel, microbatch: int) -> Transfer:
        """Into memory for bytes that travel by themselves."""
        if self.travels_by_device(tensor.device.type):
            return Transfer(tensor, self.device_backend.recv([tensor], channel.source_rank, 0), True)
        return Transfer(tensor, self.receive(tensor, channel.source_rank, tag, channel, microbatch), False)

    def wait(
        self, work: Any, peer: int, channel: Channel | None = None, microbatch: int = -1, is_short: bool = False
    ) -> None:
        """Wait for one operation; the watch sees for whom, and ends the wait if that is hopeless.

        The watch cannot end the wait for what has begun to come, or to leave (`is_short`); gloo's own limit then is ten
        seconds after ours.
        """
        watch = self.watch
        watch.waiting = waiting = Waiting(peer, channel, microbatch, self._now())
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

    def _lose(self, error: RuntimeError, waiting: Waiting) -> NoReturn:
        """The group's verdict on a failed operation."""
        self.watch.waiting = None
        timed_out = "Timed out waiting" in str(error)
        cause = f"silent for {self._timeout:g} s" if timed_out else CONNECTION_CLOSED
        raise copy(self.watch.propose(waiting.blame(self.rank, cause))) from error
