"""Who is to blame, and telling everybody.

Gloo alone cannot answer that. It reports a dead peer at once, but only to a rank that waits for
that very peer. A stopped peer it reports by a timeout, which closes *all* connections of the
rank that timed out (so waiting in slices is impossible, and the others would take that rank for
dead), and by then every rank waits for a neighbour that is itself waiting.

So each transport runs one thread that looks up, twice a second, a verdict that all ranks share
in the store of the process group:

- A rank whose peer's connection closed raises an alarm that names that peer. The first alarm
  and the first verdict stand, by the store's compare-and-set, so all ranks name the same culprit.
- A rank that has waited for longer than the timeout raises an alarm that names nobody. All ranks
  then say what they do and for whom they wait, if for anybody. The chain from the alarmed rank
  ends at the culprit: a rank that does not answer (stopped, or gone), or answers that it waits for
  nobody (busy in its own code); a chain that closes is a deadlock.
- A rank that finds a verdict cuts its own connections, by a receive that times out on purpose.
  That frees its main thread, wherever gloo holds it. It is done only after the verdict is in
  the store, so whoever sees such a connection close will find the true reason there.

The same way a step that failed, with all links whole, is put on the `news` of ranks that are busy.

Only this thread talks to the store, and through another one (`store`), because a call to a store
whose host is stopped does not return. Where a rank hosts the store, its silence convicts that rank.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from penstock.errors import PeerFailure, RunError
from penstock.runtime import plain
from penstock.runtime.secret import signed, unsigned
from penstock.runtime.transport.base import (
    Channel,
    Where,
    after_loss,
    located,
    lost_source,
    lost_target,
    nowhere,
    with_report,
)
from penstock.runtime.transport.bell import Bell
from penstock.runtime.transport.marks import Marks
from penstock.runtime.transport.store import Asker, NoAnswer
from penstock.schedule import Action

__all__ = ["Waiting", "Watch"]

BEAT = 0.5
STORE_SECONDS = 3.0  # for the store to answer
SETTLE_SECONDS = 6.0  # for the thread to settle a verdict: the store's and some beats
OUTSIDE_SECONDS = 12.0  # more patience where a rank waits for another group, which has less
STATE_SECONDS = 2.0  # for ranks to say for whom they wait: some beats


class Waiting(NamedTuple):
    """What the main thread is blocked in."""

    peer: int
    edge: Channel | None  # None: the exchange that ends a step
    microbatch: int
    since: float

    def blame(self, rank: int, cause: str) -> PeerFailure:
        """The failure of the awaited peer, as seen from `rank`."""
        if self.edge is None:
            return PeerFailure(self.peer, f"{cause} while rank {rank} waited in the exchange that ends the step")
        if self.edge.source_rank == self.peer:
            return lost_source(self.edge, self.microbatch, cause)
        return lost_target(self.edge, self.microbatch, cause)


class Watch:
    """The thread of one transport. The transport writes `waiting` and reads `verdict`."""

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
    ) -> None:
        self.waiting: Waiting | None = None
        self.outside: Callable[[PeerFailure], None] | None = None  # waits for ranks of another group; this ends that
        self.elsewhere: Callable[[], bool] = lambda: False  # waits for another group, which ends that by itself
        self.ended: Callable[[PeerFailure], None] = lambda verdict: None  # told the verdict, in the thread
        self.verdict: PeerFailure | None = None
        self.doing: Callable[[], str] = lambda: "nothing known"
        self.where: Where = nowhere
        self.news: list[PeerFailure] = []
        self._news_lock = threading.Lock()
        self._announced: PeerFailure | None = None
        self._step = 0
        self._asker = Asker(store, f"penstock-store-{rank}") if ranks > 1 else None
        self._store_host = store_host
        self._prefix = prefix
        self._rank = rank
        self._ranks = ranks
        self._timeout = timeout
        self._cut = cut
        self._beat = min(BEAT, timeout / 10)
        self._marks = Marks(self._ask, self._key, rank, ranks, min(STATE_SECONDS, timeout / 2))
        self._proposal: PeerFailure | None = None
        self._bell = bell  # rings at other ranks too, where they can hear it; else they look at their next beat
        self._wake: threading.Event | Bell = bell or threading.Event()
        self._settled = threading.Event()
        self._stopping = ranks == 1  # nobody to watch
        self._thread = threading.Thread(target=self._run, name=f"penstock-watch-{rank}", daemon=True)
        if not self._stopping:
            self._thread.start()

    def settle(self, failure: PeerFailure) -> PeerFailure:
        """Propose a verdict and return the one that stands. From the main thread."""
        if self.verdict is None and self._stopping:
            self.verdict = failure
        if self.verdict is None:
            self._proposal = failure
            self._wake.set()
            if not self._settled.wait(SETTLE_SECONDS) and self.verdict is None:
                self.verdict = failure
        assert self.verdict is not None
        return self.verdict

    def without_store(self, error: Exception) -> PeerFailure | RunError:
        """What it means for the main thread that the store has gone: its host has, where a rank hosts it."""
        if self.verdict is None and self._store_host in (None, self._rank):
            return RunError(f"the process group's store is gone, so ranks cannot meet ({error}); rebuild the group")
        if self.verdict is None:
            assert self._store_host is not None
            self.settle(PeerFailure(self._store_host, "died or left (the store that it hosts is gone)"))
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

    def _run(self) -> None:
        gone: float | None = None  # since when there is no store
        while self.verdict is None:
            self._wake.wait(self._beat)
            self._wake.clear()
            if self._stopping:
                return
            verdict = None
            if gone is None:
                try:
                    verdict = self._look()
                except NoAnswer:
                    verdict = self._without_store()
                except _Tampered as error:
                    verdict = PeerFailure(
                        self._rank,
                        f"the store of the process group holds a {error} that no rank of this run has written: "
                        f"somebody else writes to it; see docs/security.md for how to confine it",
                    )
                except Exception:
                    gone = time.monotonic()
            if gone is not None:
                verdict = self._after_store(gone)
            if verdict is not None:
                self._conclude(verdict)
        with suppress(Exception):
            self._linger()

    def _linger(self) -> None:
        """Where this process hosts the store, keep it until the others have read the verdict.

        They would else find the store gone and this rank's connection closed, and blame this rank.
        """
        assert self.verdict is not None
        self._ask("set", self._key(f"seen/{self._rank}"), "1")
        if self._store_host == self._rank:
            others = [rank for rank in range(self._ranks) if rank != self.verdict.rank]
            deadline = time.monotonic() + STORE_SECONDS
            while not self._ask("check", [self._key(f"seen/{rank}") for rank in others]):
                if time.monotonic() > deadline:
                    return
                time.sleep(self._beat / 10)

    def _conclude(self, verdict: PeerFailure) -> None:
        # The order matters: the main thread sets `waiting` and then reads `verdict`, so that it
        # either sees the verdict or is seen waiting.
        self.verdict = verdict
        self._settled.set()
        waiting, outside = self.waiting, self.outside
        if waiting is not None:
            self._cut(waiting.peer)
        if outside is not None:
            outside(verdict)
        self.ended(verdict)

    def _look(self) -> PeerFailure | None:
        """One beat: take part in what the store says, and say what this rank has to."""
        if self._ask("check", [self._key("verdict")]):
            return self._standing()
        if not self.news:
            self._read_news()
        self._marks.tell(self.outside is not None or self.elsewhere())
        waiting, proposal = self.waiting, self._proposal
        if proposal is not None or self._is_overdue(waiting):
            self._ask("compare_set", self._key("alarm"), "", _dump(self._rank, waiting, proposal))
            self._call()
        if self._ask("check", [self._key("alarm")]):
            accuser, accusation, proposal = _load("alarm", self._ask("get", self._key("alarm")))
            if accusation is None and proposal is None:
                raise _Tampered("alarm")
            return self._arbitrate(accuser, accusation, proposal)
        return None

    def _is_overdue(self, waiting: Waiting | None) -> bool:
        waited = 0.0 if waiting is None else time.monotonic() - waiting.since
        if waited < self._timeout / 2:
            self._marks.forget()
            return False
        patience = OUTSIDE_SECONDS if self._marks.anybody() else 0.0
        return waited > self._timeout + patience

    def _read_news(self) -> None:
        step, announced = self._step, self._announced
        key = self._key(f"news/{step}")
        if announced is not None:
            self._ask("compare_set", key, "", _dump(announced))
            self._call()
        if announced is not None or self._ask("check", [key]):
            failure: PeerFailure = _load("news", self._ask("get", key))[0]
            with self._news_lock:
                if step == self._step:
                    self.news.append(failure)

    def _call(self) -> None:
        if self._bell is not None:
            self._bell.call()

    def _pronounce(self, failure: PeerFailure) -> PeerFailure:
        self._ask("compare_set", self._key("verdict"), "", _dump(failure))
        return self._standing()

    def _standing(self) -> PeerFailure:
        verdict: PeerFailure = _load("verdict", self._ask("get", self._key("verdict")))[0]
        return verdict

    def _arbitrate(self, accuser: int, accusation: Waiting | None, proposal: PeerFailure | None) -> PeerFailure:
        """Say what this rank does and for whom it waits, hear the others, and judge."""
        self._ask("set", self._key(f"state/{self._rank}"), _dump(self.waiting, self._progress(), self.where()))
        states: dict[int, Waiting | None] = {}
        places: dict[int, Action | None] = {}
        doing = ["no answer"] * self._ranks
        missed = {proposal.rank} if proposal is not None else set()  # the dead need not be heard
        deadline = time.monotonic() + min(STATE_SECONDS, self._timeout)
        while len(states.keys() | missed) < self._ranks and time.monotonic() < deadline:
            if self._ask("check", [self._key("verdict")]):
                return self._standing()
            for rank in range(self._ranks):
                if rank not in states and self._ask("check", [self._key(f"state/{rank}")]):
                    states[rank], doing[rank], places[rank] = _load(
                        "state", self._ask("get", self._key(f"state/{rank}"))
                    )
            time.sleep(self._beat / 50)
        if proposal is None:
            assert accusation is not None
            proposal = judge(accuser, {**states, accuser: accusation}, self._timeout)
            if states.get(proposal.rank) is None:  # no deadlock: what it is busy with, if it has said so
                proposal = located(proposal, places.get(proposal.rank))
        return self._pronounce(with_report(proposal, doing))

    def _progress(self) -> str:
        waiting = self.waiting
        return self.doing() + ("" if waiting is None else f", waiting for rank {waiting.peer}")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _ask(self, method: str, *arguments: Any) -> Any:
        assert self._asker is not None
        return self._asker.ask(method, *arguments, patience=self._beat, give_up=self._is_hopeless)

    def _is_hopeless(self, seconds: float) -> bool:
        """Go on without the store: to stop, or where an answer is needed and none has come for long."""
        waiting = self.waiting
        overdue = waiting is not None and time.monotonic() - waiting.since > self._timeout
        return self._stopping or (seconds > STORE_SECONDS and (overdue or self._proposal is not None))

    def _after_store(self, gone: float) -> PeerFailure | None:
        """With the store its host is gone. By itself no loss: what is under way at the end of a run may still come."""
        waiting, proposal, host = self.waiting, self._proposal, self._store_host
        if host is None or host == self._rank or (proposal is not None and proposal.rank == host):
            return proposal
        doomed = waiting is not None and time.monotonic() - max(gone, waiting.since) > STATE_SECONDS
        if proposal is None and not doomed:
            return None
        return PeerFailure(host, "died or left (the store that it hosts is gone)")

    def _without_store(self) -> PeerFailure | None:
        """What this rank makes of a store that does not answer."""
        if self._store_host is not None and self._store_host != self._rank:
            return PeerFailure(
                self._store_host, f"silent: the store that it hosts has not answered for {STORE_SECONDS:g} s"
            )
        if self._proposal is not None or self.waiting is None:
            return self._proposal
        return self.waiting.blame(self._rank, f"silent for {self._timeout:g} s")


def judge(accuser: int, states: dict[int, Waiting | None], timeout: float) -> PeerFailure:
    """The end of the chain of waits that begins at the accuser."""
    path = [accuser]
    while (state := states.get(path[-1])) is not None:
        last = state
        path.append(state.peer)
        if state.peer in path[:-1]:
            break
    suffix = f" ({' waits for '.join(f'rank {rank}' for rank in path)})" if len(path) > 2 else ""
    if len(set(path)) < len(path):
        waits = {state.edge is None for rank in path[:-1] if (state := states[rank]) is not None}
        differ = "; they are probably in different calls: make each call on every rank" if len(waits) > 1 else ""
        return last.blame(path[-2], f"deadlock for {timeout:g} s{suffix}{differ},")
    how = "busy in its own code" if path[-1] in states else "stopped or dead"
    return last.blame(path[-2], f"silent for {timeout:g} s, {how}{suffix},")


plain.record(Waiting, peer=int, edge=Channel | None, microbatch=int, since=float)

_KEY = b"the store"
_PARTS: dict[str, tuple[Any, ...]] = {  # what is under each key, part by part
    "verdict": (PeerFailure,),
    "news": (PeerFailure,),
    "alarm": (int, Waiting | None, PeerFailure | None),
    "state": (Waiting | None, str, Action | None),
}


def _dump(*parts: Any) -> str:
    return base64.b64encode(signed(plain.dumps(parts), _KEY)).decode()


def _load(kind: str, text: bytes) -> tuple[Any, ...]:
    """What a rank of this run wrote with `_dump`. Whoever reaches the store can write to it: nothing else is taken."""
    try:
        content = unsigned(base64.b64decode(text, validate=True), _KEY)
        parts = None if content is None else plain.loads(content)
    except ValueError:
        parts = None
    wanted = _PARTS[kind]
    if not isinstance(parts, tuple) or len(parts) != len(wanted) or not all(map(isinstance, parts, wanted)):
        raise _Tampered(kind)
    return parts


class _Tampered(Exception):
    """Under a key of this run is something that no rank of it has written."""
