"""Who is to blame, from what ranks say that they do: pure functions, the same answer on every rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.errors import PeerFailure
from penstock.runtime.messages import plain
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.failure.peer_failures import located, lost_source, lost_target
from penstock.schedule import Action

ENDING = "in the exchange that ends the step"


class Waiting(NamedTuple):
    """What the main thread is blocked in."""

    peer: int
    edge: Channel | None  # None: an exchange, or a connection that is being made
    microbatch: int
    since: float
    reason: str = ""  # Where there is no channel: in or for what it waits; mostly found out late, see `Watch.describe`.

    def blame(self, rank: int, cause: str) -> PeerFailure:
        """Return the failure of the awaited peer, as seen from `rank`."""
        if self.edge is None:
            return PeerFailure(self.peer, f"{cause} while rank {rank} waited {self.reason or ENDING}")
        if self.edge.source_rank == self.peer:
            return lost_source(self.edge, self.microbatch, cause)
        return lost_target(self.edge, self.microbatch, cause)


plain.register(Waiting, peer=int, edge=Channel | None, microbatch=int, since=float, reason=str)


class State(NamedTuple):
    """What a rank says of itself."""

    waiting: Waiting | None
    doing: str
    where: Action | None
    step: int = 0  # Counts the exchanges of the group: calls can only be compared between two of them.
    call: str = ""  # of the user's
    seconds_unchanged: float = math.inf  # at the same action and in the same wait, as its watch has seen it
    sent: Mapping[int, int] = {}  # messages of each channel in this step
    awaits: tuple[int, int] | None = None  # the channel that it waits for, and which message of it, from 0


class Excused(NamedTuple):
    """Nobody is to blame yet: of those for whom the accuser waits, one moved on that many seconds ago."""

    seconds_unchanged: float


def judge(
    accuser: int, accusation: Waiting, states: Mapping[int, State], timeout: float, beat: float = 0.0
) -> PeerFailure | Excused:
    """Find the end of the chain of waits that begins at the accuser; or who makes another call than the others.

    In a deep pipeline a wait may well be longer than the timeout. So whoever is in the chain and moves on excuses all;
    it is blamed only once everybody in it has stood still for the timeout, as far as two beats can tell.
    """
    calls = {rank: state.call for rank, state in states.items() if state.call and state.waiting is not None}
    if len({states[rank].step for rank in calls}) == 1:
        apart = different_calls(calls)
        if apart is not None:
            return apart
    waits = {rank: state.waiting for rank, state in states.items()} | {accuser: accusation}
    path = _chain(accuser, waits)
    unchanged = _seconds_unchanged(path, states)
    if unchanged < timeout - 2 * beat:
        return Excused(unchanged)
    last = waits[path[-2]]
    assert last is not None
    for waiter, awaited in pairwise(path):
        lost = _lost_message(waits[waiter], states.get(waiter), states.get(awaited), timeout)
        if lost is not None:
            return lost
    suffix = f" ({' waits for '.join(f'rank {rank}' for rank in path)})" if len(path) > 2 else ""
    if len(set(path)) < len(path):
        return last.blame(path[-2], f"deadlock for {timeout:g} s{suffix},")
    how = "busy in its own code" if path[-1] in states else "stopped or dead"
    found = last.blame(path[-2], f"silent for {timeout:g} s, {how}{suffix},")
    return located(found, states[path[-1]].where if path[-1] in states else None)


def excused(states: Mapping[int, State], timeout: float, beat: float = 0.0) -> dict[int, float]:
    """Return how many seconds ago somebody moved on in the chain of each rank that waits.

    A chain in which nobody has is left out, whatever goes on in others: its ranks may raise an alarm of their own.
    """
    waits = {rank: state.waiting for rank, state in states.items()}
    found = {
        rank: _seconds_unchanged(_chain(rank, waits), states) for rank, waiting in waits.items() if waiting is not None
    }
    return {rank: unchanged for rank, unchanged in found.items() if unchanged < timeout - 2 * beat}


def _chain(rank: int, waits: Mapping[int, Waiting | None]) -> list[int]:
    """Follow the chain of waits from a rank: to one that waits for nobody, or that was in it before."""
    path, seen = [rank], {rank}
    while (waiting := waits.get(path[-1])) is not None:
        path.append(waiting.peer)
        if waiting.peer in seen:
            break
        seen.add(waiting.peer)
    return path


def _seconds_unchanged(path: Sequence[int], states: Mapping[int, State]) -> float:
    """Return how many seconds ago somebody moved on of those that the first rank of a chain waits for."""
    return min((states[rank].seconds_unchanged for rank in path[1:] if rank in states), default=math.inf)


def _lost_message(
    waiting: Waiting | None, waiter: State | None, awaited: State | None, timeout: float
) -> PeerFailure | None:
    """Find a message that the one has sent and the other still waits for, whatever its sender waits for now."""
    if waiting is None or waiting.edge is None or waiter is None or awaited is None or waiter.awaits is None:
        return None
    if waiter.step != awaited.step:
        return None  # Their counts are of the messages of different steps.
    number, ordinal = waiter.awaits
    if waiting.edge.source_rank != waiting.peer or awaited.sent.get(number, 0) <= ordinal:
        return None
    return lost_source(waiting.edge, waiting.microbatch, f"it sent a message that has not come for {timeout:g} s,")


def different_calls(calls: Sequence[str] | Mapping[int, str]) -> PeerFailure | None:
    """Find the rank that is in another call than most; without a minority, the first that is not in rank 0's."""
    by_rank = calls if isinstance(calls, Mapping) else dict(enumerate(calls))
    if len(set(by_rank.values())) < 2:
        return None
    (most, count), (_, next_count) = Counter(by_rank[rank] for rank in sorted(by_rank)).most_common(2)
    usual = most if count > next_count else by_rank[min(by_rank)]
    odd = min(rank for rank, call in by_rank.items() if call != usual)
    together: dict[str, list[int]] = {}
    for rank in sorted(by_rank):
        together.setdefault(by_rank[rank], []).append(rank)
    listed = ", ".join(
        f"{name_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} in {call or 'a call without a name'}"
        for call, ranks in together.items()
    )
    return PeerFailure(odd, f"the ranks are in different calls ({listed}); make each call on every rank, in one order")


def name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
