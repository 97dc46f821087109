"""Who is to blame, and telling everybody.

Gloo alone cannot answer that. It reports a dead peer at once, but only to a rank that waits for that very peer. A
stopped peer it reports by a timeout, which closes *all* connections of the rank that timed out (so waiting in slices is
impossible, and the others would take that rank for dead), and by then every rank waits for a neighbour that is itself
waiting.

So each transport runs one thread that looks up, twice a second, a verdict that all ranks share in the store of the
process group:

- A rank whose peer's connection closed raises an alarm that names that peer. The first alarm and the first verdict
  stand, by the store's compare-and-set, so all ranks name the same culprit.
- A rank that has waited for longer than the timeout raises an alarm that names nobody; on a machine so busy that this
  thread itself hardly ran meanwhile, it waits for up to three. All ranks then say what they do and for whom they wait,
  if for anybody. The chain from the alarmed rank ends at the culprit: a rank that does not answer (stopped, or gone),
  or answers that it waits for nobody (busy in its own code); a chain that closes is a deadlock. Where somebody in the
  chain has moved on within the timeout, as in a pipeline so deep that it takes longer to fill, the alarm is called off,
  and the ranks whose own chains move on wait for another timeout; a chain that stands still is not excused by that.
- Who raised the alarm judges; the others look on, and judge only where it does not. (With a thousand ranks, a
  thousand judges would have the store answer a million questions.)
- A rank that has waited for a second says in which of the user's calls it is. Where all ranks wait and not all are in
  the same call, they wait in vain, and the odd one is named at once.
- A rank that finds a verdict cuts its own connections, by a receive that times out on purpose. That frees its main
  thread, wherever gloo holds it. It is done only after the verdict is in the store, so whoever sees such a connection
  close will find the true reason there.

The same way a step that failed, with all links whole, is put on the `news` of ranks that are busy.

Only this thread talks to the store, and through another one (`messages/store`), because a call to a store whose host is
stopped does not return. Where a rank hosts the store, its silence convicts that rank; where it has left, so does that.
What is written there (`bulletin`) is plain (`notes`); who is to blame follows from what ranks say (`blame`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from types import MethodType
from typing import Any, TypeVar
from weakref import WeakMethod

from penstock.errors import PeerFailure, RunError
from penstock.messages.clock import CLOCK, Clock, Event
from penstock.messages.store import Asker, NoAnswer
from penstock.runtime.transport.base import Where, nowhere
from penstock.runtime.transport.failure.bell import Bell
from penstock.runtime.transport.failure.blame import Excused, State, Waiting, different_calls, excused, judge
from penstock.runtime.transport.failure.bulletin import Bulletin
from penstock.runtime.transport.failure.compiling import is_compiling
from penstock.runtime.transport.failure.notes import STRANGER, Alarm, Tampered
from penstock.runtime.transport.failure.peer_failures import after_loss, placed, with_report
from penstock.runtime.transport.failure.silence import Marks, Overdue

BEAT = 0.5
STORE_SECONDS = 3.0  # for the store to answer
SETTLE_SECONDS = 6.0  # for the thread to settle a verdict: the store's and some beats
STATE_SECONDS = 2.0  # for ranks to say for whom they wait: some beats
CALL_SECONDS = 1.0  # of waiting, before a rank says in which call it is
SLOW = 4  # a store is silent only where it is so many times slower than it was
TURNS = 40  # looks for the answers of others, at least: a busy machine has fewer in the same time
NEAR_RANKS = 16  # so many may ask the store every few milliseconds
MOST_SECONDS = 10.0  # for what takes a busy machine longer
Said = TypeVar("Said")
Traffic = Callable[[Waiting | None], tuple[dict[int, int], tuple[int, int] | None]]  # see `State`: sent, and awaits


def held_weakly(call: Callable[[], Said], otherwise: Said) -> Callable[[], Said]:
    """A method that does not keep its object alive; once that is gone, the answer is `otherwise`.

    The thread of a watch is alive as long as its transport. If it held the rank that it asks, a pipeline that is
    dropped without `close()` would never be freed.
    """
    if not isinstance(call, MethodType):
        return call
    method = WeakMethod(call)

    def answer() -> Said:
        found = method()
        return otherwise if found is None else found()

    return answer


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
        cut: Callable[[int], None],
        bell: Bell | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self.clock = clock
        self.waiting: Waiting | None = None
        self.call: Callable[[], str] = lambda: ""  # what the user has called, where all ranks must call the same
        self.outside: Callable[[PeerFailure], None] | None = None  # waits for ranks of another group; this ends that
        self.elsewhere: Callable[[], bool] = lambda: False  # waits for another group, which ends that by itself
        self.ended: Callable[[PeerFailure], None] = lambda verdict: None  # told the verdict, in the thread
        self.verdict: PeerFailure | None = None
        self.doing: Callable[[], str] = lambda: "nothing known"
        self.where: Where = nowhere
        self.traffic: Traffic = lambda waiting: ({}, None)
        self.news: list[PeerFailure] = []
        self.far_host: PeerFailure | None = None  # what to say where the store is gone that no rank here had
        self.place: dict[str, int] = {}  # of this group among others: its replica and shard, for a failure's name
        self._news_lock = threading.Lock()
        self._announced: PeerFailure | None = None
        self._step = 0
        self._place: tuple[int, str, Waiting | None] | None = None  # where this rank was at the last look: step, action
        self._place_since = clock.now()
        self._stood_still = 0.0  # seconds that this very thread did not run, where they were more than the timeout
        self._stood_until = -math.inf  # when that was over
        self._asker = Asker(store, f"penstock-store-{rank}", clock) if ranks > 1 else None
        self._slowest = 0.0  # seconds that the store took for an answer of late
        self._bulletin = Bulletin(self._ask, prefix, rank, ranks)
        self._store_host = store_host
        self._rank = rank
        self._ranks = ranks
        self._timeout = timeout
        self._cut = cut
        self._beat = min(BEAT, timeout / 10)
        fresh = min(STATE_SECONDS, timeout / 2)
        outside = Marks("outside", self._ask, self._bulletin, rank, ranks, fresh, clock.now)
        compiling = Marks("compiling", self._ask, self._bulletin, rank, ranks, fresh, clock.now)
        self._overdue = Overdue(timeout, self._beat, outside, compiling, clock.now)
        self._proposal: PeerFailure | None = None
        self._bell = bell  # rings at other ranks too, where they can hear it; else they look at their next beat
        self._wake: Event | Bell = bell or clock.event()
        self._settled = clock.event()
        self._stopping = ranks == 1  # nobody to watch
        self._thread = clock.worker(self._run, f"penstock-watch-{rank}")
        if not self._stopping:
            self._thread.start()

    # -- from the main thread

    def settle(self, failure: PeerFailure) -> PeerFailure:
        """Propose a verdict and return the one that stands."""
        if self.verdict is None and self._stopping:
            self.verdict = failure
        if self.verdict is None:
            self._proposal = failure
            self._wake.set()
            begin = self.clock.now()
            while not self._settled.wait(self._beat) and self._may_settle(begin):
                pass
            if self.verdict is None:
                self.verdict = failure
        assert self.verdict is not None
        return self.verdict

    def _may_settle(self, begin: float) -> bool:
        """Whether the thread, on a machine that may be busy, is still about to find the verdict."""
        now = self.clock.now()
        asked = None if self._asker is None else self._asker.asked_at
        quick = now - max(begin, asked or begin) < SETTLE_SECONDS
        return self._thread.is_alive() and (now - begin < SETTLE_SECONDS or (quick and now - begin < MOST_SECONDS))

    def without_store(self, error: Exception) -> PeerFailure | RunError:
        """What it means for the main thread that the store has gone: its host has, where a rank hosts it."""
        if self.verdict is None:
            lost = self._host_lost()
            if lost is None:
                return RunError(f"the process group's store is gone, so ranks cannot meet ({error}); rebuild the group")
            self.settle(lost)
        assert self.verdict is not None
        return after_loss(self.verdict)

    def announce(self, failure: PeerFailure) -> None:
        """Put this failure of the step on the news of all ranks, soon."""
        self._announced = failure
        self._wake.set()

    def end_step(self) -> None:
        """News of the last step are old."""
        with self._news_lock:
            self._step += 1
            self._announced = None
            self.news.clear()

    def close(self) -> None:
        """End the threads."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(SETTLE_SECONDS)
        if self._asker is not None:
            self._asker.close(SETTLE_SECONDS)

    # -- the thread

    def _run(self) -> None:
        gone: float | None = None  # since when there is no store
        while self.verdict is None:
            begin = self.clock.now()
            self._wake.wait(self._beat)
            self._wake.clear()
            if self.clock.now() - begin > self._timeout:
                self._stood_until = self.clock.now()
                self._stood_still = self._stood_until - begin
            if self._stopping:
                return
            verdict = None
            if gone is None:
                try:
                    verdict = self._look()
                except NoAnswer:
                    verdict = self._without_store()
                except Tampered as error:
                    verdict = PeerFailure(
                        self._rank,
                        f"the store of the process group holds a {error} {STRANGER}",
                    )
                except Exception:
                    gone = self.clock.now()
            if gone is not None:
                verdict = self._after_store(gone)
            if verdict is not None:
                if gone is None:
                    with suppress(Exception):
                        self._hand_on(verdict)
                self._conclude(verdict)

    def _hand_on(self, verdict: PeerFailure) -> None:
        """Say that this rank has read the verdict; where its process hosts the store, wait until all others have.

        It may leave as soon as it knows. The others would then find the store gone, and blame this rank.
        """
        self._bulletin.tell_read()
        if self._store_host == self._rank:
            others = [rank for rank in range(self._ranks) if rank != verdict.rank]
            nap = self._beat / 10
            for _ in range(int(STORE_SECONDS / nap)):
                if self._bulletin.have_read(others):
                    break
                self.clock.sleep(nap)

    def _conclude(self, verdict: PeerFailure) -> None:
        # The order matters: the main thread sets `waiting` and then reads `verdict`, so that it
        # either sees the verdict or is seen waiting.
        self.verdict = verdict = placed(verdict, self.place)
        self._settled.set()
        waiting, outside = self.waiting, self.outside
        if waiting is not None:
            self._cut(waiting.peer)
        if outside is not None:
            outside(verdict)
        self.ended(verdict)
        self._free()

    def _free(self) -> None:
        """A connection that is closed already closes no other: try each, as long as the main thread waits."""
        for peer in [rank for rank in range(self._ranks) if rank != self._rank] * 2:
            for _ in range(10):
                if self.waiting is None or self._stopping:
                    return
                self.clock.sleep(self._beat / 10)
            self._cut(peer)

    def _look(self) -> PeerFailure | None:
        """One beat: take part in what the store says, and say what this rank has to."""
        self._note_place()
        step = self._step
        has_notes = self._bulletin.has_changed(step)
        verdict = self._bulletin.verdict() if has_notes else None
        if verdict is not None:
            return verdict
        if not self.news and (has_notes or self._announced is not None):
            self._read_news()
        self._overdue.outside.tell(self.outside is not None or self.elsewhere())
        self._overdue.compiling.tell(is_compiling())
        waiting, proposal = self.waiting, self._proposal
        if proposal is not None and self.clock.now() - self._stood_until < self._timeout:
            proposal = PeerFailure(self._rank, f"stood still for {self._stood_still:.0f} s, so that the others left")
        mine: Alarm | None = None
        if proposal is not None:
            mine = Alarm(self._rank, waiting, proposal)
        elif (apart := self._compare_calls(waiting)) is not None:
            mine = Alarm(self._rank, waiting, apart, heard=True)
        elif self._overdue(waiting):
            mine = Alarm(self._rank, waiting, None)
        if mine is not None:
            self._bulletin.raise_alarm(mine)
            self._call_others()
        alarm = self._bulletin.alarm() if has_notes or mine is not None else None
        if alarm is not None:
            return self._arbitrate(alarm)
        self._bulletin.has_looked(step)
        return None

    def _note_place(self) -> None:
        place = self._step, self.doing(), self.waiting
        if place != self._place:
            self._place, self._place_since = place, self.clock.now()

    def _compare_calls(self, waiting: Waiting | None) -> PeerFailure | None:
        """Once this rank has waited for a while: who is in another call, if all ranks wait and one is."""
        patience = min(CALL_SECONDS, self._timeout / 4)
        step, call = self._step, self.call()
        if waiting is None or not call or self.clock.now() - waiting.since < patience:
            return None
        self._bulletin.tell_call(step, call)
        return different_calls(self._bulletin.calls(step))

    def _read_news(self) -> None:
        step, announced = self._step, self._announced
        if announced is not None:
            self._bulletin.tell_news(step, announced)
            self._call_others()
        failure = self._bulletin.news(step)
        with self._news_lock:
            if failure is not None and step == self._step:
                self.news.append(failure)

    def _call_others(self) -> None:
        if self._bell is not None:
            self._bell.call()

    def _arbitrate(self, alarm: Alarm) -> PeerFailure | None:
        """Say what this rank does and for whom it waits; then hear the others and judge, or hear the judgement."""
        self._bulletin.tell_state(self._state())
        states: dict[int, State] = {}
        missed = {alarm.failure.rank} if alarm.failure is not None and not alarm.heard else set()  # the dead
        is_judge = alarm.rank == self._rank
        begin, turns = self.clock.now(), 0
        nap = self._beat / 50 * min(50.0, max(1.0, self._ranks / NEAR_RANKS))
        while len(states.keys() | missed) < self._ranks and self._is_patient(begin, turns, is_judge):
            turns += 1
            verdict = self._bulletin.verdict()
            if verdict is not None:
                return verdict
            if self._goes_on():
                return None
            if is_judge:
                states |= self._hear(states)
            self.clock.sleep(nap)
        if not is_judge:
            states = self._hear(states)
        failure = alarm.failure
        if failure is None:
            assert alarm.waiting is not None
            found = judge(alarm.rank, alarm.waiting, states, self._timeout, self._beat)
            if isinstance(found, Excused):
                self._bulletin.call_off({alarm.rank: found.still} | excused(states, self._timeout, self._beat))
                self._goes_on()
                return None
            failure = found
        doing = [states[rank].doing if rank in states else "no answer" for rank in range(self._ranks)]
        return self._bulletin.pronounce(with_report(failure, doing))

    def _hear(self, states: Mapping[int, State]) -> dict[int, State]:
        """What ranks do that had not said it before."""
        return self._bulletin.states(rank for rank in range(self._ranks) if rank not in states)

    def _goes_on(self) -> bool:
        """Whether the alarm was called off; a rank that is in a chain of waits in which somebody moves on waits on."""
        reasons = self._bulletin.called_off()
        if reasons is None:
            return False
        self._bulletin.round += 1
        if self._rank in reasons:
            self._overdue.excuse(self.clock.now() - reasons[self._rank])
        return True

    def _is_patient(self, begin: float, turns: int, is_judge: bool) -> bool:
        """Whether to wait on for ranks to answer: on a busy machine, where turns take long, for longer."""
        seconds = self.clock.now() - begin
        if not is_judge:  # which needs some time itself
            return seconds < 2 * min(STATE_SECONDS, self._timeout) + self._beat
        return seconds < min(STATE_SECONDS, self._timeout) or (turns < TURNS and seconds < MOST_SECONDS)

    def _state(self) -> State:
        waiting = self.waiting
        doing = self.doing() + ("" if waiting is None else f", waiting for rank {waiting.peer}")
        still = self.clock.now() - self._place_since
        return State(waiting, doing, self.where(), self._step, self.call(), still, *self.traffic(waiting))

    def _ask(self, method: str, *arguments: Any) -> Any:
        assert self._asker is not None
        begin = self.clock.now()
        answer = self._asker.ask(method, *arguments, patience=self._beat, give_up=self._is_hopeless)
        self._slowest = max(0.95 * self._slowest, self.clock.now() - begin)
        return answer

    # -- without the store

    def _is_hopeless(self, seconds: float) -> bool:
        """Go on without the store: to stop, or where an answer is needed and none has come for long."""
        waiting = self.waiting
        overdue = waiting is not None and self._overdue.waited(waiting) > self._timeout
        silent = seconds > max(STORE_SECONDS, SLOW * self._slowest)
        return self._stopping or (silent and (overdue or self._proposal is not None))

    def _host_lost(self) -> PeerFailure | None:
        """What it means that the store has left, where a rank had it that is not this one."""
        if self._store_host is None:
            return None if self.far_host is None else copy(self.far_host)
        if self._store_host == self._rank:
            return None
        return PeerFailure(self._store_host, "died or left (the store that it hosts is gone)")

    def _after_store(self, gone: float) -> PeerFailure | None:
        """With the store its host is gone. By itself no loss: what is under way at the end of a run may still come."""
        waiting, proposal, lost = self.waiting, self._proposal, self._host_lost()
        if lost is None or (proposal is not None and proposal.rank == self._store_host):
            return proposal
        doomed = waiting is not None and self.clock.now() - max(gone, waiting.since) > STATE_SECONDS
        return None if proposal is None and not doomed else lost

    def _without_store(self) -> PeerFailure | None:
        """What this rank makes of a store that does not answer."""
        if self._store_host is not None and self._store_host != self._rank:
            return PeerFailure(
                self._store_host, f"silent: the store that it hosts has not answered for {STORE_SECONDS:g} s"
            )
        if self._proposal is not None or self.waiting is None:
            return self._proposal
        return self.waiting.blame(self._rank, f"silent for {self._timeout:g} s")
