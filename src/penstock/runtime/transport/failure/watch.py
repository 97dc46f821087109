"""Who is to blame, and telling everybody.

Gloo alone cannot answer that. It reports a dead peer only to a rank that waits for that very peer, and a stopped one by
a timeout, which closes *all* connections of the rank that timed out (so waiting in slices is impossible); by then every
rank waits for a neighbour that is itself waiting. So each transport runs one thread that looks up, twice a second, a
verdict that all ranks share in the group's store:

- A rank whose peer's connection closed raises an alarm that names that peer. The first alarm and the first verdict
  stand, by the store's compare-and-set, so all ranks name the same culprit. Where only its device waits, this thread
  looks at the connection.
- A rank that has waited for longer than the timeout raises an alarm that names nobody; on a machine so busy that this
  thread itself hardly ran meanwhile, it waits for up to three.
- After an alarm all ranks say what they do, and a verdict follows, or the alarm is called off (`arbitration`).
- A rank that has waited for a second says in which of the user's calls it is. Where all ranks wait and not all are in
  the same call, they wait in vain, and the odd one is named at once.
- A rank that finds a verdict aborts the communicators of its device, and closes its own connections, by a receive that
  times out on purpose. That frees its main thread, wherever gloo or a kernel holds it; and whoever sees such a
  connection close finds the true reason in the store.

The same way a step that failed, with all links whole, is put on the `news` of ranks that are busy.

Once the channels are open, only this thread talks to the store, and through another one (`messages/store`), because a
call to a store whose host is stopped does not return. Where a rank hosts the store, its silence convicts that rank;
where it has left, so does that. What is written there is plain (`notes`); who is to blame follows from what ranks say
(`blame`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penstock.errors import PeerFailure, RunError
from penstock.runtime.messages.clock import CLOCK, Clock
from penstock.runtime.messages.store import Asker, NoAnswer
from penstock.runtime.transport.failure.arbitration import MOST_SECONDS, Arbitration
from penstock.runtime.transport.failure.blame import Waiting, different_calls
from penstock.runtime.transport.failure.notes import STRANGER, Alarm, Bulletin, Tampered
from penstock.runtime.transport.failure.own_state import OwnState
from penstock.runtime.transport.failure.peer_failures import CONNECTION_CLOSED, after_loss, placed
from penstock.runtime.transport.failure.silence import COMPILATIONS, STATE_SECONDS, STORE_SECONDS, Overdue, StoreHost

BEAT_SECONDS = 0.5  # Between two looks into the store.
DECISION_SECONDS = 6.0  # The thread must find a verdict within this time: the store's and some beats.
CALL_SECONDS = 1.0  # A rank waits so long before it reports in which call it is.
SLOW_FACTOR = 4  # a store is silent only where it is so many times slower than it was


class Watch:
    """The thread of one transport. The transport writes `waiting`, and reads `verdict`."""

    def __init__(
        self,
        store: Any,
        store_host: int | None,
        prefix: str,
        rank: int,
        ranks: int,
        timeout: float,
        close_connections: Callable[[int], None],
        clock: Clock = CLOCK,
    ) -> None:
        # what the transport reads, and what it sets
        self.verdict: PeerFailure | None = None
        self.news: list[PeerFailure] = []
        self.clock = clock
        self.close_connections = close_connections
        self.waiting: Waiting | None = None
        self.own = OwnState(clock.now)
        self.store_host = StoreHost(store_host, rank)
        self.axes: dict[str, int] = {}  # The replica and shard of this group among others, for a failure's name.
        self.leave_other_group: Callable[[PeerFailure], None] | None = None  # ends a wait for ranks of another group
        self.waits_in_other_group: Callable[[], bool] = lambda: False  # Such waits are ended by that group.
        self.ended: Callable[[PeerFailure], None] = lambda verdict: None  # told the verdict before anybody leaves
        self.device_waiting: Callable[[], Waiting | None] = lambda: None  # whatever the device's host does
        self.is_closed: Callable[[int], bool] = lambda peer: False  # whether the connection to that rank is
        self.abort_device: Callable[[], None] = lambda: None  # ends that wait
        self.free_device: Callable[[], None] = lambda: None  # ends the connections of the device
        # how the ranks talk to each other
        self._rank, self._ranks, self._timeout = rank, ranks, timeout
        self._beat = min(BEAT_SECONDS, timeout / 10)
        self._asker = Asker(store, f"penstock-store-{rank}", clock) if ranks > 1 else None
        self._slowest = 0.0  # seconds that the store took for an answer of late
        self._bulletin = Bulletin(self._ask, prefix, rank, ranks)
        self._overdue = Overdue(self._bulletin, timeout, self._beat, clock.now)
        self._arbitration = Arbitration(self._bulletin, self._overdue, timeout, self._beat, clock)
        # what the main thread has told the thread
        self._announced: PeerFailure | None = None
        self._news_lock = threading.Lock()
        self._proposal: PeerFailure | None = None
        self._alarmed: PeerFailure | None = None  # The rank that the store's alarm names, as this rank has read it.
        self._decided = clock.event()
        self._probed: tuple[Waiting | None, float] = (None, 0.0)  # a wait of the device, how long it was at a look
        # the thread
        self._stood_still = 0.0  # seconds that this very thread did not run, where they were more than the timeout
        self._stood_until = -math.inf  # Time at which that was over.
        self._wake = clock.event()
        self._stopping = ranks == 1  # nobody to watch
        self._stop_by = math.inf  # When to leave what the device of a dropped transport still waits for.
        self._thread = clock.worker(self._watch, f"penstock-watch-{rank}")
        if not self._stopping:
            self._thread.start()

    # -- from the main thread

    def propose(self, failure: PeerFailure) -> PeerFailure:
        """Propose a verdict and return the one that stands."""
        if self.verdict is None and not self._stopping:
            self._proposal = failure
            self._wake.set()
            begin = self.clock.now()
            while not self._decided.wait(self._beat) and self._may_be_decided(begin):
                pass
        self.verdict = verdict = self.verdict or failure
        return verdict

    def _may_be_decided(self, begin: float) -> bool:
        """Return whether the thread, on a machine that may be busy, is still about to find the verdict."""
        now = self.clock.now()
        asked = None if self._asker is None else self._asker.asked_at
        quick = now - max(begin, asked or begin) < DECISION_SECONDS
        return self._thread.is_alive() and (now - begin < DECISION_SECONDS or (quick and now - begin < MOST_SECONDS))

    def without_store(self, error: Exception) -> PeerFailure | RunError:
        """Return what it means for the main thread that the store has gone: its host has, where a rank hosts it."""
        lost = self.verdict or self.store_host.gone()
        if lost is None:
            return RunError(f"the process group's store is gone, so ranks cannot meet ({error}); rebuild the group")
        return after_loss(self.propose(lost))

    def find_culprit(self, peer: int) -> PeerFailure | None:
        """Make all ranks report for whom they wait: a wait for this peer has failed, and it may not be to blame."""
        self.waiting = Waiting(peer, None, -1, 0.0)  # overdue
        self._wake.set()
        self._decided.wait(2 * DECISION_SECONDS)
        return self.verdict

    def announce(self, failure: PeerFailure) -> None:
        """Put this failure of the step on the news of all ranks, soon."""
        self._announced = failure
        self._wake.set()

    def end_step(self) -> None:
        """Forget the news of the last step."""
        with self._news_lock:
            self.own.step += 1
            self._announced = None
            self.news.clear()

    def stop(self) -> None:
        """Tell the threads to end, and do not wait for them: a finalizer runs on any thread, these two included.

        A device may be far behind its host. What is under way on it, others wait for: it ends before the thread does.
        """
        self._stop_by = self.clock.now() + self._timeout
        self._stopping = True
        self._wake.set()
        if not self._thread.is_alive():
            self.free_device()

    def close(self) -> None:
        self.stop()
        if self._thread.is_alive():
            self._thread.join(DECISION_SECONDS)
        if self._asker is not None:
            self._asker.close(DECISION_SECONDS)

    # -- the thread

    def _watch(self) -> None:
        try:
            self._run()
        finally:
            if self._stopping:  # Otherwise the main thread uses it.
                self.free_device()
            if self._asker is not None:
                self._asker.stop()

    def _run(self) -> None:
        gone: float | None = None  # Time since which there is no store.
        while self.verdict is None:
            begin = self.clock.now()
            self._wake.wait(self._beat)
            self._wake.clear()
            if self.clock.now() - begin > self._timeout:
                self._stood_until = self.clock.now()
                self._stood_still = self._stood_until - begin
            if self._stopping and (self.device_waiting() is None or self.clock.now() > self._stop_by):
                return
            verdict = None
            if gone is None:
                try:
                    verdict = self._look()
                except NoAnswer:
                    verdict = self._without_store()
                except Tampered as error:
                    verdict = PeerFailure(self._rank, f"the store of the process group holds a {error} {STRANGER}")
                    with suppress(Exception):  # Whoever wrote it did not announce it: the others would not look.
                        self._bulletin.tell_of_note()
                except Exception:
                    gone = self.clock.now()
            if gone is not None:
                verdict = self._after_store(gone)
                if verdict is not None:  # The verdict is of a rank that has left because this one stood still.
                    verdict = self._own_stop() or verdict
            elif verdict is not None:
                with suppress(Exception):
                    self._hand_on(verdict)
            if verdict is not None:
                self._conclude(verdict)

    def _hand_on(self, verdict: PeerFailure) -> None:
        """Report that this rank has read the verdict; where its process hosts the store, wait until all others have.

        It may leave as soon as it knows. The others would then find the store gone, and blame this rank. Those that
        have answered the alarm are alive: on a busy machine they may take longer, and are waited for. One that was busy
        in its own code is among them, although it is the one that is named.
        """
        self._bulletin.tell_read()
        if not self.store_host.is_here:
            return
        alive = self._bulletin.states(range(self._ranks)).keys()
        others = {rank for rank in range(self._ranks) if rank != verdict.rank} | alive
        begin, seconds = self.clock.now(), 0.0
        while seconds < MOST_SECONDS and not self._bulletin.have_read(others if seconds < STORE_SECONDS else alive):
            self.clock.sleep(self._beat / 10)
            seconds = self.clock.now() - begin

    def _conclude(self, verdict: PeerFailure) -> None:
        # The order matters: the main thread sets `waiting` and then reads `verdict`, so that it either sees the verdict
        # or is seen waiting. Other groups are told before it is freed: it may leave at once.
        self.verdict = verdict = placed(verdict, self.axes)
        self.ended(verdict)
        self._decided.set()
        self.abort_device()
        waiting, leave = self.waiting, self.leave_other_group
        if waiting is not None:
            self.close_connections(waiting.peer)
        if leave is not None:
            leave(verdict)
        self._free()

    def _free(self) -> None:
        """Try each connection as long as the main thread waits: one that is closed already closes no other."""
        for peer in [rank for rank in range(self._ranks) if rank != self._rank] * 2:
            for _ in range(10):
                if self.waiting is None or self._stopping:
                    return
                self.clock.sleep(self._beat / 10)
            self.close_connections(peer)

    def _look(self) -> PeerFailure | None:
        """Run one beat: take part in what the store shows, and report what this rank has to."""
        self.own.look(self.waiting)
        step = self.own.step
        has_notes = self._bulletin.has_changed(step)
        verdict = self._bulletin.verdict() if has_notes else None
        if verdict is not None:
            return verdict
        if not self.news and (has_notes or self._announced is not None):
            self._read_news()
        self._overdue.in_other_group.tell(self.leave_other_group is not None or self.waits_in_other_group())
        self._overdue.compiling.tell(COMPILATIONS.is_under_way())
        waiting, proposal = self._awaited(), self._proposal or self._lost_by_device()
        if proposal is not None:
            proposal = self._own_stop() or proposal
        apart = self._compare_calls(waiting) if proposal is None else None
        raises = proposal is not None or apart is not None or self._overdue(waiting)
        if raises:
            self._bulletin.raise_alarm(Alarm(self._rank, waiting, proposal or apart, heard=apart is not None))
        alarm = self._bulletin.alarm() if has_notes or raises else None
        if alarm is not None:
            self._alarmed = alarm.failure
            return self._arbitration.verdict(alarm, self.own.state(waiting))
        self._bulletin.has_looked(step)
        return None

    def _awaited(self) -> Waiting | None:
        """Return what this rank waits for: its main thread or, where that is in no wait of ours, its device."""
        waiting = self.waiting or self.device_waiting()
        return None if waiting is None else self.describe(waiting)

    def describe(self, waiting: Waiting) -> Waiting:
        """Add to a wait for no message of a channel what it is for: only who reports the wait has to know."""
        is_known = waiting.edge is not None or waiting.reason
        return waiting if is_known else waiting._replace(reason=self.own.reason)

    def _lost_by_device(self) -> PeerFailure | None:
        """Return the failure of the rank that the device waits for, if the connection to its process is closed.

        A look leaves a few bytes behind on both ranks, so each comes after twice the wait of the one before.
        """
        waiting, (before, waited) = self.device_waiting(), self._probed
        if waiting is None or waiting != before or self._stopping:  # the user may have destroyed a dropped group
            self._probed = waiting, 0.0
            return None
        now = self.clock.now() - waiting.since
        if now < max(2 * waited, min(CALL_SECONDS, self._timeout / 4)):
            return None
        self._probed = waiting, now
        # A rank that has left first saw the last of its transfers end: this rank asks its device once more.
        is_lost = self.is_closed(waiting.peer) and self.device_waiting() == waiting
        return waiting.blame(self._rank, CONNECTION_CLOSED) if is_lost else None

    def _compare_calls(self, waiting: Waiting | None) -> PeerFailure | None:
        """Find who is in another call, once this rank has waited for a while and all ranks wait."""
        patience = min(CALL_SECONDS, self._timeout / 4)
        step, call = self.own.call_step, self.own.call()
        if waiting is None or not call or self.clock.now() - waiting.since < patience:
            return None
        self._bulletin.tell_call(step, call)
        return different_calls(self._bulletin.calls(step))

    def _read_news(self) -> None:
        step, announced = self.own.step, self._announced
        if announced is not None:
            self._bulletin.tell_news(step, announced)
        failure = self._bulletin.news(step)
        with self._news_lock:
            if failure is not None and step == self.own.step:
                self.news.append(failure)

    def _ask(self, method: str, *arguments: Any) -> Any:
        assert self._asker is not None
        begin = self.clock.now()
        answer = self._asker.ask(method, *arguments, patience=self._beat, give_up=self._is_hopeless)
        self._slowest = max(0.95 * self._slowest, self.clock.now() - begin)
        return answer

    def _own_stop(self) -> PeerFailure | None:
        """Return why others have left, if this rank itself stood still for longer than the timeout a moment ago."""
        if self.clock.now() - self._stood_until > self._timeout:
            return None
        return PeerFailure(self._rank, f"stood still for {self._stood_still:.0f} s, so that the others left")

    # -- without the store

    def _is_hopeless(self, seconds: float) -> bool:
        """Go on without the store: to stop, or where an answer is needed and none has come for long."""
        waiting = self._awaited()
        overdue = waiting is not None and self._overdue.waited(waiting) > self._timeout
        silent = seconds > max(STORE_SECONDS, SLOW_FACTOR * self._slowest)
        return self._stopping or (silent and (overdue or self._proposal is not None))

    def _after_store(self, gone: float) -> PeerFailure | None:
        """Judge what a lost store means. By itself no loss: what is under way at the end of a run may still come.

        A host that goes after an alarm that names somebody, leaves because of that one.
        """
        if self._alarmed is not None:
            return self._alarmed
        waiting, proposal, lost = self._awaited(), self._proposal or self._lost_by_device(), self.store_host.gone()
        if lost is None or (proposal is not None and proposal.rank == self.store_host.host):
            return proposal
        doomed = waiting is not None and self.clock.now() - max(gone, waiting.since) > STATE_SECONDS
        return None if proposal is None and not doomed else lost

    def _without_store(self) -> PeerFailure | None:
        """Judge a store that does not answer: it means nothing, if it has only stopped listening to end."""
        if self._stopping or self._alarmed is not None:
            return self._alarmed
        silent = self.store_host.silent()
        if silent is not None:
            return self._own_stop() or silent
        waiting = self._awaited()
        if self._proposal is not None or waiting is None:
            return self._proposal
        return waiting.blame(self._rank, f"silent for {self._timeout:g} s")
