"""Who is to blame, and telling everybody.

Gloo alone cannot answer that. It reports a dead peer at once, but only to a rank that waits for
that very peer. A stopped peer it reports by a timeout, which closes *all* connections of the
rank that timed out (so waiting in slices is impossible, and the others would take that rank for
dead), and by then every rank waits for a neighbour that is itself waiting.

So each transport runs one thread that looks up, twice a second, a verdict that all ranks share
in the store of the process group:

- A rank whose peer's connection closed proposes that as the verdict. The first proposal stands,
  by the store's compare-and-set, so all ranks name the same culprit.
- A rank that has waited for longer than the timeout raises an alarm. All ranks then say for
  whom they wait, if for anybody. The chain from the alarmed rank ends at the culprit: a rank that
  does not answer (stopped, or gone), or answers that it waits for nobody (busy in its own
  code); a chain that closes is a deadlock.
- A rank that finds a verdict cuts its own connections, by a receive that times out on purpose.
  That frees its main thread, wherever gloo holds it. It is done only after the verdict is in
  the store, so whoever sees such a connection close will find the true reason there.

Only this thread talks to the store, because a call to a store whose host is stopped does not
return; the main thread waits for its answer for a few seconds and goes by its own view then.
"""

from __future__ import annotations

import base64
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.errors import PeerFailure
from penstock.runtime.transport.base import Channel, lost_source, lost_target

__all__ = ["Waiting", "Watch"]

BEAT = 0.5
ANSWER_SECONDS = 3.0  # for the store to answer
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
    ) -> None:
        self.waiting: Waiting | None = None
        self.verdict: PeerFailure | None = None
        self._store = store
        self._store_host = store_host
        self._prefix = prefix
        self._rank = rank
        self._ranks = ranks
        self._timeout = timeout
        self._cut = cut
        self._beat = min(BEAT, timeout / 10)
        self._proposal: PeerFailure | None = None
        self._asked_at: float | None = None  # when the store call that is under way began
        self._wake = threading.Event()
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
            if not self._settled.wait(ANSWER_SECONDS) and self.verdict is None:
                self.verdict = self._store_host_failure() or failure
        assert self.verdict is not None
        return self.verdict

    def close(self) -> None:
        """End the thread. One that is stuck in a dead store is left behind; it is a daemon."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(ANSWER_SECONDS)

    def _run(self) -> None:
        beat: float | None = self._beat
        while self.verdict is None:
            self._wake.wait(beat)
            self._wake.clear()
            if self._stopping:
                return
            verdict = self._proposal
            if beat is not None:
                try:
                    verdict = self._look()
                except Exception:
                    beat = None  # the store is gone: what this rank sees by itself is all there is
            if verdict is not None:
                self._conclude(verdict)

    def _conclude(self, verdict: PeerFailure) -> None:
        # The order matters: the main thread sets `waiting` and then reads `verdict`, so that it
        # either sees the verdict or is seen waiting.
        self.verdict = verdict
        self._settled.set()
        waiting = self.waiting
        if waiting is not None:
            self._cut(waiting.peer)

    def _look(self) -> PeerFailure | None:
        if self._proposal is not None:
            return self._pronounce(self._proposal)
        if self._ask(self._store.check, [self._key("verdict")]):
            return self._standing()
        waiting = self.waiting
        if waiting is not None and time.monotonic() - waiting.since > self._timeout:
            self._ask(self._store.set, self._key("alarm"), _dump((self._rank, waiting)))
        if self._ask(self._store.check, [self._key("alarm")]):
            return self._arbitrate(*_load(self._ask(self._store.get, self._key("alarm"))))
        return None

    def _pronounce(self, failure: PeerFailure) -> PeerFailure:
        self._ask(self._store.compare_set, self._key("verdict"), "", _dump(failure))
        return self._standing()

    def _standing(self) -> PeerFailure:
        verdict: PeerFailure = _load(self._ask(self._store.get, self._key("verdict")))
        return verdict

    def _arbitrate(self, accuser: int, accusation: Waiting) -> PeerFailure | None:
        """Say for whom this rank waits, hear the others, and follow the chain from the accuser."""
        self._ask(self._store.set, self._key(f"state/{self._rank}"), _dump(self.waiting))
        states: dict[int, Waiting | None] = {}
        deadline = time.monotonic() + min(STATE_SECONDS, self._timeout)
        while len(states) < self._ranks and time.monotonic() < deadline:
            if self._ask(self._store.check, [self._key("verdict")]):
                return self._standing()
            for rank in range(self._ranks):
                if rank not in states and self._ask(self._store.check, [self._key(f"state/{rank}")]):
                    states[rank] = _load(self._ask(self._store.get, self._key(f"state/{rank}")))
            time.sleep(self._beat / 10)
        states[accuser] = accusation
        return self._pronounce(judge(accuser, states, self._timeout))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        self._asked_at = time.monotonic()
        answer = call(*arguments)
        self._asked_at = None
        return answer

    def _store_host_failure(self) -> PeerFailure | None:
        """Where a rank's own process hosts the store, a store that does not answer is that rank being stopped."""
        asked = self._asked_at
        if asked is None or self._store_host is None or self._store_host == self._rank:
            return None
        cause = f"silent: the store that it hosts has not answered for {time.monotonic() - asked:.0f} s"
        return PeerFailure(self._store_host, cause)


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
        return last.blame(path[-2], f"deadlock for {timeout:g} s{suffix}")
    how = "busy in its own code" if path[-1] in states else "stopped or dead"
    return last.blame(path[-2], f"silent for {timeout:g} s, {how}{suffix},")


def _dump(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _load(text: bytes) -> Any:  # what `_dump` of a rank of this group wrote
    return pickle.loads(base64.b64decode(text))
