"""The seam between a program and the wire.

An executor knows actions, never sockets: it opens the channels of a program once, and then
each RECV action is a `post`, each first use of what came is a `receive`, each SEND action is a
`send`. The transports below this seam (threads of one process, torch.distributed) must not be
told apart by what the executor sees: the same order, the same checks, the same failures. That
makes the thread transport the fake of every fast test, and at capacity 0 the proof that a
program needs no buffering.

A channel is a directed edge between two stages for one direction of traffic. The k-th message
that is sent on it belongs to the k-th receive that is posted on it, and every message says
which step and microbatch it is for, so a mistaken order is an error (`MessageError`) and never
a swapped tensor. Different channels never mix and never hold each other up.

How failure travels::

    a rank's compute raises   ->  it walks the rest of its program with `send_failure` and
                                  `discard`; all take part in `exchange`; links end clean.
                                  Who waits for no message for long finds it in `news`
    a peer dies or is silent  ->  the same `PeerFailure` on every rank, wherever it waits, and `broken`
                                  is set; from then on `send_failure` does nothing, `discard`
                                  returns the loss, and all else raises it: rebuild the group
    a message is not the due  ->  `MessageError`, and `broken` is set: the two programs differ

Nothing waits for longer than `timeout`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import MessageError, PeerFailure, UsageError
from penstock.messages import plain
from penstock.schedule import Action

__all__ = ["Channel", "Transport", "calling"]

REBUILD = "the group must be rebuilt"
Where = Callable[[], Action | None]  # the action that a rank is at, if it is at one


def nowhere() -> Action | None:
    """For a rank that does not say where it is."""
    return None


@dataclass(frozen=True, slots=True)
class Channel:
    """One directed edge between two stages on different ranks, for one kind of traffic."""

    source_stage: int
    target_stage: int
    direction: Literal["F", "B"]
    source_rank: int
    target_rank: int

    def __str__(self) -> str:
        return f"{self.direction} of stage {self.source_stage} to {self.target_stage}"

    def send_action(self, microbatch: int) -> str:
        """The action that sends on this channel, in the notation of schedules."""
        return f"{self.source_stage}SEND_{self.direction}{microbatch}"

    def receive_action(self, microbatch: int) -> str:
        """The action that receives from this channel, in the notation of schedules."""
        return f"{self.target_stage}RECV_{self.direction}{microbatch}"


plain.record(Channel, source_stage=int, target_stage=int, direction=str, source_rank=int, target_rank=int)


class Transport(ABC):
    """Moves values between the ranks of one pipeline. Used by one thread a rank."""

    rank: int
    ranks: int
    timeout: float
    torn: bool = False  # whether Ctrl-C in the middle of a call would leave it in disorder, see `interrupts`
    call: str = ""  # what this rank's user has called, where all ranks must call the same; see `calling`
    news: list[PeerFailure]  # what another rank announced in this step; look, and stop computing

    @property
    def exchanges(self) -> int:
        """How many there were, the same on every rank between two of them; 0 where nobody needs to know."""
        return 0

    @property
    @abstractmethod
    def broken(self) -> PeerFailure | None:
        """The loss after which nothing but `send_failure`, `discard` and `close` (on threads: `reset`) is of use."""

    @abstractmethod
    def open(self, channels: Sequence[Channel]) -> None:
        """Serve these channels from now on; `channel` below is an index into them.

        All channels of the whole program, the same list in the same order on every rank. Another
        list may be opened between steps; the same list again costs nothing.
        """

    @abstractmethod
    def post(self, channel: int, microbatch: int) -> None:
        """A RECV action: make ready for the next message of the channel. Never blocks."""

    @abstractmethod
    def receive(self, channel: int, microbatch: int) -> Any:
        """Wait for the message, check that it is the due one, and return its value.

        Posts the receive first where that has not been done. Tensors are leaves, with
        `requires_grad` as it was at the sender. Raises the sender's `PeerFailure` where the
        sender had nothing but that to send.
        """

    @abstractmethod
    def send(self, channel: int, microbatch: int, value: Any) -> None:
        """A SEND action: any pytree of tensors, `None` and plain values. Must not be changed in place after."""

    @abstractmethod
    def send_failure(self, channel: int, microbatch: int, failure: PeerFailure) -> None:
        """Send, in the place of that message, the reason why there is none."""

    @abstractmethod
    def discard(self, channel: int, microbatch: int) -> PeerFailure | None:
        """Take the message off the wire, posted or not, and drop it; returns the failure if it was one."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until all that was sent has left this rank."""

    @abstractmethod
    def exchange(self, value: Any) -> list[Any]:
        """Give a small plain value (see `plain`) to every rank and get every rank's. Ends the step.

        If any rank has lost a peer, all ranks raise the same `PeerFailure` instead; so they do where they are in
        different calls.
        """

    def awaits(self, channel: int, microbatch: int) -> bool:
        """Whether a receive that an interrupt has ended is still to be discarded."""
        return False

    @abstractmethod
    def report_by(self, doing: Callable[[], str], where: Where = nowhere) -> None:
        """How to say, from any thread, what this rank is doing, and at which action it is; for the report of a loss."""

    @abstractmethod
    def announce(self, failure: PeerFailure) -> None:
        """This step has failed: tell ranks that compute and wait for nobody, by their `news`. Never blocks."""

    @abstractmethod
    def abort(self, failure: PeerFailure) -> None:
        """Give up without draining: set `broken`, and wake or tell whom that can reach."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what earlier steps left behind. On every rank, while no rank is in a step."""

    @abstractmethod
    def close(self) -> None:
        """Release all that the transport holds. May be called twice."""

    def _check_whole(self) -> None:
        """Every call that moves data begins here: a broken group must not train on."""
        if self.broken is not None:
            raise after_loss(self.broken)


@contextmanager
def calling(transport: Transport | None, call: str) -> Iterator[None]:
    """Inside, this rank is in that call of its user, unless it is in one already: a call may make others."""
    if transport is None or transport.call:
        yield
        return
    transport.call = call
    try:
        yield
    finally:
        transport.call = ""


def after_loss(loss: PeerFailure) -> PeerFailure:
    """The same loss, as the answer to a later call."""
    later = copy(loss)
    if REBUILD not in loss.cause:
        later.cause = f"{loss.cause}; {REBUILD}"
    return copy(later)  # copied again, so that its text is made from the new cause


def failure_from(text: bytes, peer: int) -> PeerFailure:
    """The failure that a peer sent in the place of a message."""
    try:
        failure = plain.loads(text)
    except plain.NotPlainError as error:
        return PeerFailure(peer, f"it failed, and what it said of that cannot be read: {error}")
    if not isinstance(failure, PeerFailure):
        return PeerFailure(peer, f"it failed, and said no more than {type(failure).__name__}")
    return failure


def whole_again(error: BaseException) -> BaseException:
    """The same error without the advice to rebuild the group, where that is not needed."""
    if not isinstance(error, PeerFailure) or REBUILD not in error.cause:
        return error
    told = copy(error)
    told.cause = error.cause.removesuffix(f"; {REBUILD}")
    told = copy(told)
    told.__cause__ = error.__cause__
    return told


def located(failure: PeerFailure, action: Action | None) -> PeerFailure:
    """The same failure at the action that the rank was at, where it could tell: that, not what others awaited of it."""
    if action is None:
        return failure
    told = copy(failure)
    told.stage, told.action, told.microbatch = action.stage, str(action), action.microbatch
    return copy(told)  # copied again, so that its text is made with the place


def placed(failure: PeerFailure, place: Mapping[str, int]) -> PeerFailure:
    """The same failure with its replica and shard, where it has none."""
    told = copy(failure)
    for axis, number in place.items():
        if getattr(told, axis) is None:
            setattr(told, axis, number)
    return copy(told)  # copied again, so that its text is made anew


def with_report(failure: PeerFailure, doing: Sequence[str]) -> PeerFailure:
    """The same failure with what each rank was doing."""
    told = copy(failure)
    told.report = "\n".join(["what each rank was doing:", *(f"  rank {rank}: {it}" for rank, it in enumerate(doing))])
    return copy(told)  # copied again, so that its text is made with the report


def lost_source(channel: Channel, microbatch: int, cause: str) -> PeerFailure:
    """The rank that should have sent did not."""
    return PeerFailure(
        channel.source_rank,
        f"{cause} while rank {channel.target_rank} waited in {channel.receive_action(microbatch)}",
        stage=channel.source_stage,
        action=channel.send_action(microbatch),
        microbatch=microbatch,
    )


def lost_target(channel: Channel, microbatch: int, cause: str) -> PeerFailure:
    """The rank that should have received did not."""
    return PeerFailure(
        channel.target_rank,
        f"{cause} while rank {channel.source_rank} waited in {channel.send_action(microbatch)}",
        stage=channel.target_stage,
        action=channel.receive_action(microbatch),
        microbatch=microbatch,
    )


def wrong_message(channel: Channel, due: str, came: str) -> MessageError:
    """What was due and what came: the two ranks disagree about the program."""
    return MessageError(
        f"rank {channel.target_rank} was due {due} on channel {channel} from rank {channel.source_rank}, "
        f"but {came} came; both ranks must run the same program"
    )


def check_channels(channels: Sequence[Channel], ranks: int) -> tuple[Channel, ...]:
    """Refuse channels that no transport can serve."""
    for index, channel in enumerate(channels):
        ends = (channel.source_rank, channel.target_rank)
        if not all(0 <= end < ranks for end in ends):
            raise UsageError(f"channel {index} ({channel}) joins ranks {ends}, but there are {ranks} ranks")
        if channel.source_rank == channel.target_rank:
            raise UsageError(f"channel {index} ({channel}) stays on rank {ends[0]}; that is a hand-over, not a send")
    if len(set(channels)) != len(channels):
        raise UsageError("the same channel is listed twice; each (stage, stage, direction) has one")
    return tuple(channels)
