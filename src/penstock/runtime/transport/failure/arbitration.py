"""From an alarm to a verdict: all ranks say what they do, and the one that raised the alarm judges.

The others look on, and judge only where it does not. (A thousand judges would ask the store a million questions.)

Where the alarm names nobody, all say for whom they wait, if for anybody. The chain from the alarmed rank ends at the
culprit: a rank that does not answer (stopped, or gone), or answers that it waits for nobody (busy in its own code); a
chain that closes is a deadlock. Where somebody in the chain has moved on within the timeout, as in a deep pipeline that
fills, the alarm is called off, and the ranks whose own chains move on wait for another timeout; a chain that stands
still is not excused by that.
"""

from __future__ import annotations

from penstock.errors import PeerFailure
from penstock.runtime.messages.clock import Clock
from penstock.runtime.transport.failure.blame import Excused, State, excused, judge
from penstock.runtime.transport.failure.notes import Alarm, Bulletin
from penstock.runtime.transport.failure.peer_failures import with_report
from penstock.runtime.transport.failure.silence import STATE_SECONDS, Overdue

# Looks for the answers of others, at least: a busy machine has fewer in the same time.
ANSWER_LOOKS = 40
NEAR_RANKS = 16  # So many may ask the store every few milliseconds.
MOST_SECONDS = 10.0  # What takes a busy machine longer has so long.


class Arbitration:
    """One rank's part in it."""

    def __init__(self, bulletin: Bulletin, overdue: Overdue, timeout: float, beat: float, clock: Clock) -> None:
        self._bulletin, self._overdue = bulletin, overdue
        self._timeout, self._beat, self._clock = timeout, beat, clock

    def verdict(self, alarm: Alarm, own: State) -> PeerFailure | None:
        """Report what this rank does; then collect what others do and judge, or wait for the judgement.

        None: the alarm was called off.
        """
        board = self._bulletin
        board.tell_state(own)
        states: dict[int, State] = {}
        missed = {alarm.failure.rank} if alarm.failure is not None and not alarm.heard else set()  # the dead
        is_judge = alarm.rank == board.rank
        begin, looks = self._clock.now(), 0
        nap = self._beat / 50 * min(50.0, max(1.0, board.ranks / NEAR_RANKS))
        while len(states.keys() | missed) < board.ranks and self._is_patient(begin, looks, is_judge):
            looks += 1
            verdict = board.verdict()
            if verdict is not None:
                return verdict
            if self._is_called_off():
                return None
            if is_judge:
                states |= board.states(set(range(board.ranks)) - states.keys())
            self._clock.sleep(nap)
        if not is_judge:
            states = board.states(range(board.ranks))
        failure = alarm.failure
        if failure is None:
            assert alarm.waiting is not None
            found = judge(alarm.rank, alarm.waiting, states, self._timeout, self._beat)
            if isinstance(found, Excused):
                others = excused(states, self._timeout, self._beat)
                board.call_off({alarm.rank: found.seconds_unchanged} | others)
                self._is_called_off()
                return None
            failure = found
        doing = [states[rank].doing if rank in states else "no answer" for rank in range(board.ranks)]
        return board.pronounce(with_report(failure, doing))

    def _is_called_off(self) -> bool:
        """Return whether the alarm was called off; a rank in a chain of waits in which somebody moves on waits on."""
        reasons = self._bulletin.called_off()
        if reasons is None:
            return False
        self._bulletin.round += 1
        if self._bulletin.rank in reasons:
            self._overdue.excuse(self._clock.now() - reasons[self._bulletin.rank])
        return True

    def _is_patient(self, begin: float, looks: int, is_judge: bool) -> bool:
        """Return whether to wait on for ranks to answer: on a busy machine, where looks take long, for longer."""
        seconds = self._clock.now() - begin
        if not is_judge:  # A judge needs some time itself.
            return seconds < 2 * min(STATE_SECONDS, self._timeout) + self._beat
        return seconds < min(STATE_SECONDS, self._timeout) or (looks < ANSWER_LOOKS and seconds < MOST_SECONDS)
