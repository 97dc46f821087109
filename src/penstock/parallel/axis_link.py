"""A line to the ranks that stand beside this one on another axis, with the same promises as between stages.

torch's collectives move the tensors. What they lack is an answer when a member fails: who waits in one, waits. So an
`AxisLink` keeps, on the same process group, the watch that pipelines have: a rank that is lost is named by all others,
and one that must leave makes those that wait for it leave too. On the dp axis the numbers of the group are replicas,
and all members have the same rank in their pipelines: failures are told in these words.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from penstock.devices import CPU, on_accelerator, own_backend
from penstock.errors import PeerFailure
from penstock.runtime.transport.base import Where, nowhere
from penstock.runtime.transport.distributed.transport import DistributedTransport
from penstock.runtime.transport.failure.blame import Waiting
from penstock.runtime.transport.failure.own_state import held_weakly
from penstock.runtime.transport.failure.peer_failures import CONNECTION_CLOSED, after_loss, placed
from penstock.runtime.transport.failure.silence import LONGEST_SECONDS

LATER_SECONDS = 6.0  # a pipeline finds out for itself first which of its ranks is silent
SOON_SECONDS = 2.0  # The backend's timeout may be later by this where nobody else looks at a wait.
SLACK_SECONDS = 10.0  # Elsewhere it is the last resort.


class AxisLink:
    """This rank's end. `word` is what the members are called; `unseen`: code that is not ours waits for them."""

    def __init__(
        self, group: Any, timeout: float, pipeline: DistributedTransport, word: str = "replica", unseen: bool = False
    ) -> None:
        self.group, self.word = group, word
        self.size, self.index = dist.get_world_size(group), dist.get_rank(group)
        self._pipeline, self._rank = pipeline, pipeline.rank
        self._inside = ""  # what this rank waits in, in words
        self._passed: DeviceWaits | None = None
        self._timeout = timeout + LATER_SECONDS
        self.transport = DistributedTransport(group, self._timeout)
        self._watch = self.transport.watch
        self._watch_pipeline()
        # Waits that nobody else looks at have only the backend's own timeout.
        limit = timeout + SOON_SECONDS if unseen else self._timeout + SLACK_SECONDS
        if CPU in group._device_types:
            group._get_backend(CPU).set_timeout(timedelta(seconds=limit))
        device = pipeline.device
        own = own_backend(group, device.type) if device is not None and on_accelerator(device) else None
        if device is not None and own is not None:
            if not unseen:  # The watch sees them. A device's own limit ends the process, also where a peer compiles.
                own.set_timeout(timedelta(seconds=self._timeout + LONGEST_SECONDS))
            self._watch_device(own, device)

    def _watch_device(self, backend: Any, device: torch.device) -> None:
        """Watch collectives in which the device waits, while its host goes on; they end with this link."""
        self._passed = passed = DeviceWaits(device, (self.index + 1) % self.size, f"for the other {self.word}s")
        pipeline, elsewhere = self._pipeline.watch, self._pipeline.watch.waits_in_other_group
        pipeline.waits_in_other_group = lambda: elsewhere() or passed.first() is not None
        self._watch.device_waiting, self._watch.abort_device = passed.first, partial(_abort, backend)

    def _watch_pipeline(self) -> None:
        """Watch the pipeline: a member that waits in it is not to blame, and it knows who is; each ends with the other.

        A pipeline may be lost while no rank of it waits on its link: the members of this one then wait for another
        rank's copies, and would hear of it by their own timeouts only. The watches' threads must keep neither alive.
        """
        watch, link = self._pipeline.watch, ref(self)
        others = watch.ended  # the links of other axes

        def ended(verdict: PeerFailure) -> None:
            here = link()
            if here is not None:
                here._lost(verdict)

        def pipeline_ended(verdict: PeerFailure) -> None:
            others(verdict)
            here = link()
            if here is not None:
                here.abort(verdict)

        watch.ended = pipeline_ended
        self._watch.waits_in_other_group = lambda: watch.waiting is not None
        self._watch.ended = ended

    def describe_by(self, doing: Callable[[], str], where: Where = nowhere) -> None:
        doing, link = held_weakly(doing, "gone"), ref(self)

        def report() -> str:
            here = link()
            return doing() + (f", in {here._inside}" if here is not None and here._inside else "")

        self.transport.describe_by(report, where)

    @property
    def broken(self) -> PeerFailure | None:
        """What ended this link, if something has."""
        found = self.transport.broken
        return None if found is None else self._renamed(found)

    def exchange(self, value: Any) -> list[Any]:
        return self.all_gather(self._pipeline.call, value)

    def all_gather(self, call: str, value: Any) -> list[Any]:
        """Return every member's value of this call, which all must make."""
        before, self._inside, self.transport.call = self._inside, call, call
        try:
            with self._pipeline.in_other_group(self.abort):
                return self.transport.exchange(value)
        except PeerFailure as failure:
            self.abort(failure)  # members that do different things: none of their collectives would meet again
            raise self._lost(failure) from None
        finally:
            self._inside, self.transport.call = before, ""

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Surround anything that waits for all members; where it cannot end well, a named failure ends it."""
        watch = self._watch
        before, watch.waiting = watch.waiting, Waiting((self.index + 1) % self.size, None, -1, monotonic())
        inside, self._inside, self.transport.call = self._inside, what, self._pipeline.call
        try:
            if watch.verdict is not None:
                raise after_loss(watch.verdict)
            with self._pipeline.in_other_group(self.abort):
                yield
                if self._passed is not None:
                    self._passed.note()
        except PeerFailure as failure:
            raise self._lost(failure) from None
        except RuntimeError as error:
            if watch.verdict is None and not _from_backend(error):
                raise
            raise self._lost(self._verdict(what)) from error
        finally:
            watch.waiting, self._inside, self.transport.call = before, inside, ""

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Surround code that may wait for all members anywhere: it is freed when the group is lost."""
        with self.transport.in_other_group(self._collapse), self._pipeline.in_other_group(self.abort):
            yield

    def _collapse(self, verdict: PeerFailure) -> None:
        self._watch.close_connections((self.index + 1) % self.size)  # the pipeline ends with the link

    def explain(self, error: BaseException) -> PeerFailure | None:
        """Return the loss of a member that an error comes from, if it does."""
        if isinstance(error, PeerFailure) or not isinstance(error, RuntimeError):
            return None
        if self._watch.verdict is None and not _from_backend(error):
            return None
        return self._lost(self._verdict("a stage"))

    def _lost(self, failure: PeerFailure) -> PeerFailure:
        """End this link; the pipeline goes with it, since its other ranks may wait on links that have not ended."""
        renamed = self._renamed(failure)
        if self._pipeline.broken is None:
            self._pipeline.abort(renamed)
        return renamed

    def _verdict(self, what: str) -> PeerFailure:
        """Return the group's verdict on a collective that broke; of two members, it was the other."""
        watch = self._watch
        if watch.verdict is not None:
            return watch.verdict
        if self.size == 2:
            cause = f"{CONNECTION_CLOSED} while {self.word} {self.index} waited in {what}"
            watch.waiting = None
            return watch.propose(PeerFailure(1 - self.index, cause))
        found = watch.find_culprit((self.index + 1) % self.size)
        return found or PeerFailure(self.index, f"a {self.word} was lost in {what}; nobody could say which")

    def wait(self, work: Any, what: str) -> None:
        with self.waiting(what):
            work.wait()

    def abort(self, failure: PeerFailure) -> None:
        """Make all members leave with this failure, since this rank cannot go on."""
        if self.transport.broken is None:
            self.transport.abort(self.named(failure))

    def named(self, failure: PeerFailure) -> PeerFailure:
        """Return a failure of this rank or its pipeline, as others on this axis know it."""
        return placed(failure, {self.word: self.index})

    def close(self) -> None:
        self.transport.close()

    def _renamed(self, failure: PeerFailure) -> PeerFailure:
        """Return a failure of the group, in the words of the pipeline."""
        renamed = copy(failure)
        if getattr(renamed, self.word) is None:
            renamed.rank = self._rank  # The group counts its members, not the pipeline's ranks.
            renamed.cause = re.sub(r"\brank(s?) (?=\d)", rf"{self.word}\1 ", renamed.cause)
            setattr(renamed, self.word, failure.rank)
        if renamed.report:
            renamed.report = renamed.report.replace("what each rank was doing", f"what each {self.word} was doing")
            renamed.report = renamed.report.replace("\n  rank ", f"\n  {self.word} ")
            renamed.report = re.sub(r"(?m)(, waiting for) rank (?=\d+$)", rf"\1 {self.word} ", renamed.report)
        return renamed


class DeviceWaits:
    """Waits of a device for a peer, by events behind them on the stream that computes."""

    def __init__(self, device: torch.device, peer: int, reason: str) -> None:
        self._device, self._peer, self._reason = device, peer, reason
        self._events: deque[torch.Event] = deque()
        self._since: tuple[torch.Event | None, float] = (None, 0.0)  # of the first event, when it was first seen
        self._looking = threading.Lock()  # The watches of this link and of the pipeline look.

    def note(self) -> None:
        """Note that the device waits in what was launched last."""
        self._events.append(torch.accelerator.current_stream(self._device).record_event())

    def first(self) -> Waiting | None:
        """Return the first wait that has not ended, since it was first seen to be that."""
        with self._looking:
            while self._events and self._events[0].query():
                self._events.popleft()
            first = self._events[0] if self._events else None
            if first is not self._since[0]:
                self._since = first, monotonic()
            return None if first is None else Waiting(self._peer, None, -1, self._since[1], self._reason)


def _abort(backend: Any) -> None:
    """End the kernels that wait for a peer."""
    with suppress(RuntimeError):
        backend.abort()


def _from_backend(error: RuntimeError) -> bool:
    """Return whether an error is a lost connection, and not the user's."""
    text = str(error)
    return any(word in text for word in ("gloo", "Connection", "pair closure", "Timed out", "NCCL", "closed by peer"))
