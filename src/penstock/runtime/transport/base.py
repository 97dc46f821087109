"""The seam between a program and the wire.

An executor knows actions, never sockets: it opens the channels of a program once, and then each RECV action is a `post`
of an end (`channel`), each first use of what came is a `receive`, each SEND action is a `send`. The transports below
this seam (threads, shared memory, torch.distributed) must not be told apart by what the executor sees: the same order,
checks and failures. That makes the thread transport the fake of every fast test, and at capacity 0 the proof that a
program needs no buffering.

How failure travels::

    a rank's compute raises   ->  it walks the rest of its program with `send_failure` and
                                  `discard`; all take part in `exchange`; links end clean.
                                  A rank that is busy computing learns of it from `news`
    a peer dies or is silent  ->  the same `PeerFailure` on every rank, wherever it waits, and `broken`
                                  is set; from then on `send_failure` does nothing, `discard`
                                  returns the loss, and all else raises it: rebuild the group
    an unexpected message     ->  `MessageError`, and `broken` is set: the two programs differ

Nobody waits for longer than `timeout` for ranks that stand still.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import PeerFailure
from penstock.runtime.messages.clock import CLOCK, Clock
from penstock.runtime.transport.channel import Channel, ChannelEnds
from penstock.runtime.transport.failure.peer_failures import after_loss
from penstock.schedule import Action

Where = Callable[[], Action | None]  # the action that a rank is at, if it is at one


def nowhere() -> Action | None:
    """Return no action, for a rank that does not report where it is."""
    return None


class Transport(ABC):
    """Moves values between the ranks of one pipeline. Used by one thread per rank."""

    rank: int
    ranks: int
    timeout: float
    clock: Clock = CLOCK  # Times the waits for other ranks.
    ends: ChannelEnds  # The channels that are open.
    holds_interrupts = False  # whether Ctrl-C waits for messages and for the step's end, see `interrupts`
    call: str = ""  # what this rank's user has called, where all ranks must call the same
    news: list[PeerFailure]  # what another rank announced in this step; look, and stop computing

    @property
    def exchanges(self) -> int:
        """How many exchanges there were, the same on every rank between two of them; 0 where nobody needs to know."""
        return 0

    @property
    @abstractmethod
    def broken(self) -> PeerFailure | None:
        """The loss after which nothing but `send_failure`, `discard` and `close` (on threads: `reset`) is of use."""

    @abstractmethod
    def open(self, channels: Sequence[Channel]) -> None:
        """Serve these channels of a whole program, the same list on every rank.

        The methods below name a channel by its index in this list, its `channel_number`.

        Another list may be opened between steps; the same list again costs nothing.
        """

    @abstractmethod
    def describe_link(self, source: int, target: int) -> str:
        """Describe what carries values from one rank to another."""

    # -- one message, by the number of its channel; see the ends of `channel`

    def post(self, channel_number: int, microbatch: int) -> None:
        self.ends.receiving(channel_number).post(microbatch)

    def receive(self, channel_number: int, microbatch: int) -> Any:
        return self.ends.receiving(channel_number).receive(microbatch)

    def discard(self, channel_number: int, microbatch: int) -> PeerFailure | None:
        """Take the message off the wire and drop it; returns the failure if it was one."""
        if self.broken is not None:
            return self.broken
        failure: PeerFailure | None = self.ends.receiving(channel_number).discard(microbatch)
        return failure

    def send(self, channel_number: int, microbatch: int, value: Any) -> None:
        end = self.ends.sending(channel_number)
        end.ready[microbatch] = value
        end.send(microbatch)

    def send_failure(self, channel_number: int, microbatch: int, failure: PeerFailure) -> None:
        """Send, in the place of a message, the reason why there is none."""
        if self.broken is None:
            self.ends.sending(channel_number).send_failure(microbatch, failure)

    # -- a step

    @abstractmethod
    def flush(self) -> None:
        """Wait until all that was sent has left this rank."""

    @abstractmethod
    def exchange(self, value: Any) -> list[Any]:
        """Give a small plain value (see `runtime/messages/plain`) to every rank and get every rank's.

        The counts of messages begin anew: messages belong to the round between two exchanges. (A training step ends
        with one; so does any other call that all ranks must make.)

        If any rank has lost a peer, all ranks raise the same `PeerFailure` instead; so they do where they are in
        different calls.
        """

    def post_exchange(self, value: Any) -> Callable[[], list[Any]]:
        """Post an exchange whose answers are collected later, by calling what this returns. The step ends here at once.

        Messages of the next step may travel before that. There is one such exchange at a time: another one, of either
        kind, collects it first. This default waits for the answers here.
        """
        answers = self.exchange(value)
        return lambda: answers

    def known_answers(self) -> list[Any] | None:
        """Return the answers of the exchange posted last, if they are here and all ranks ran one program.

        They are still to be collected. Waits for nobody; this default knows nothing.
        """
        return None

    @abstractmethod
    def describe_by(self, doing: Callable[[], str], where: Where = nowhere) -> None:
        """Set how to tell, from any thread, what this rank is doing, and at which action; for the report of a loss."""

    @abstractmethod
    def announce(self, failure: PeerFailure) -> None:
        """Report that this step has failed to ranks that compute and wait for nobody, by their `news`. Never blocks."""

    @abstractmethod
    def abort(self, failure: PeerFailure) -> None:
        """Give up without draining: set `broken`, and wake or tell whom that can reach."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what earlier steps left behind. On every rank, while no rank is in a step."""

    @abstractmethod
    def close(self) -> None:
        """Release all that the transport holds. May be called twice."""

    def check_not_broken(self) -> None:
        """Raise the loss, if there was one: a broken group must not train on."""
        if self.broken is not None:
            raise after_loss(self.broken)
