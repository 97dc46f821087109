"""A rehearsal of five ranks, each computing for a second at a time, was ended by a timeout of 4 s: nobody was silent.

The last rank waits until the first microbatch has come through all others: in a deep pipeline longer than any timeout.
The chain of waits ended at a rank that was "busy in its own code", with an action that it had begun a moment before. So
an alarm is called off where somebody in the chain has moved on within the timeout; who stands still is named as before.
"""

from __future__ import annotations

import time
from threading import Thread

from penstock.errors import PeerFailure
from penstock.runtime.transport import Channel, ThreadTransport
from penstock.runtime.transport.failure.blame import Excused, State, Waiting, judge
from penstock.schedule import build
from penstock.tools.rehearsal.rehearse import rehearse


def test_on_processes_a_long_wait_for_ranks_that_move_is_no_failure() -> None:
    found = rehearse(build("gpipe", 5, 8), timeout=4.0)
    assert found.completed == (1,) * 5
    assert not found.notices


def test_on_processes_a_rank_that_stands_still_in_a_long_wait_is_named() -> None:
    found = rehearse(build("gpipe", 5, 8), timeout=4.0, faults=["stall 2 at 2F4"])
    assert found.named == (2,)
    assert {each.rank for each in found.notices} == {0, 1, 3, 4}


def test_who_moved_excuses_and_who_stood_still_does_not() -> None:
    waits = {rank: Waiting(rank + 1, Channel(rank + 1, rank, "B", rank + 1, rank), 0, 0.0) for rank in range(2)}

    def says(waiting: Waiting | None, still: float) -> State:
        return State(waiting, "", None, seconds_unchanged=still)

    moved = {0: says(waits[0], 60), 1: says(waits[1], 60), 2: says(None, 3.0)}
    assert judge(0, waits[0], moved, 60.0) == Excused(3.0)
    stood = {**moved, 2: says(None, 59.5)}
    found = judge(0, waits[0], stood, 60.0, beat=0.5)
    assert isinstance(found, PeerFailure)
    assert found.rank == 2


def test_on_threads_a_long_wait_for_ranks_that_move_is_no_failure() -> None:
    """Rank 1 waits for four times the timeout; rank 0 goes from action to action meanwhile."""
    timeout = 0.5
    transports = ThreadTransport.group(2, timeout=timeout)
    channel = Channel(0, 1, "F", 0, 1)
    doing = iter(range(10_000))
    transports[0].describe_by(lambda: f"at action {next(doing)}")
    for each in transports:
        each.open([channel])

    def sends_late() -> None:
        time.sleep(4 * timeout)
        transports[0].send(0, 0, "late")

    sender = Thread(target=sends_late)
    sender.start()
    assert transports[1].receive(0, 0) == "late"
    sender.join()
