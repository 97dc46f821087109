"""A rank that dies, stops or falls silent is named by all others, in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from deadlines import SOON, TIMEOUT
from tiers import in_tiers, mostly_exhaustive, mostly_slow
from transport_harness import Outcome, run, values
from transports import ON_PROCESSES

from penstock.errors import PeerFailure
from penstock.runtime.transport import Channel
from penstock.runtime.transport.failure.blame import Waiting

LINE = [Channel(0, 1, "F", 0, 1), Channel(1, 2, "F", 1, 2), Channel(1, 0, "B", 1, 0), Channel(2, 1, "B", 2, 1)]


PAIR = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)]


def three_in_line(transport: Any) -> None:
    """One microbatch forth and back through ranks 0, 1 and 2."""
    if transport.rank == 0:
        transport.send(0, 0, torch.ones(3))
        transport.receive(2, 0)
    elif transport.rank == 1:
        transport.send(1, 0, transport.receive(0, 0))
        transport.send(2, 0, transport.receive(3, 0))
    else:
        transport.send(3, 0, transport.receive(1, 0))
    transport.exchange(None)


def loses_a_rank(transport: Any, victim: int, how: int) -> Any:
    """A pipeline of three in which one rank dies or stops; whom the others name, and how soon."""
    transport.open(LINE)
    transport.describe_by(lambda: f"at {transport.rank}F0")
    three_in_line(transport)
    if transport.rank == victim:
        os.kill(os.getpid(), how)
        return None
    start = time.monotonic()
    with pytest.raises(PeerFailure) as caught:
        three_in_line(transport)
    seconds = time.monotonic() - start
    for call in (lambda: transport.open(PAIR), lambda: transport.exchange(None), transport.reset):
        with pytest.raises(PeerFailure, match="must be rebuilt"):
            call()
    return caught.value.rank, str(caught.value), seconds


def living(outcomes: list[Outcome], victim: int) -> list[Any]:
    assert outcomes[victim].silent
    return [outcome.get() for rank, outcome in enumerate(outcomes) if rank != victim]


KILLED = [
    (victim, f"{name}{store}")
    for name in ON_PROCESSES
    for victim, store in ((0, ""), (1, "-tcp"), (2, ""), (2, "-tcp"))
]
SLOW = [(1, "shared-tcp"), (2, "shared"), (0, "distributed")]


@pytest.mark.parametrize(
    ("victim", "kind"),
    in_tiers(KILLED, [(2, "distributed-tcp")], [each for each in KILLED if each not in SLOW]),
)
def test_a_rank_that_is_killed_is_named_by_all_others_at_once(victim: int, kind: str) -> None:
    outcomes = run(kind, loses_a_rank, ranks=3, timeout=TIMEOUT, victim=victim, how=signal.SIGKILL)
    for rank, text, seconds in living(outcomes, victim):
        assert rank == victim, text
        assert "died or left" in text
        told = [f"rank {other}: {'no answer' if other == victim else f'at {other}F0'}" for other in range(3)]
        assert all(line in text for line in told), text
        assert seconds < SOON


@pytest.mark.parametrize(
    ("victim", "kind"),
    in_tiers(
        [(victim, f"{name}{store}") for name in ON_PROCESSES for victim, store in ((2, "-tcp"), (1, ""))],
        [(2, "shared-tcp")],
        [(1, "shared"), (2, "distributed-tcp")],
    ),
)
def test_a_rank_that_is_stopped_is_named_by_all_others_after_the_timeout(victim: int, kind: str) -> None:
    outcomes = run(kind, loses_a_rank, ranks=3, timeout=4.0, victim=victim, how=signal.SIGSTOP)
    for rank, text, seconds in living(outcomes, victim):
        assert rank == victim, text
        assert "silent for 4 s, stopped or dead" in text
        assert 3.9 < seconds < SOON


@pytest.mark.slow
@pytest.mark.parametrize("kind", [f"{name}-tcp" for name in ON_PROCESSES])
def test_a_stopped_rank_that_hosts_the_store_does_not_hang_the_others(kind: str) -> None:
    outcomes = run(kind, loses_a_rank, ranks=3, timeout=1.0, victim=0, how=signal.SIGSTOP)
    for rank, text, seconds in living(outcomes, 0):
        assert rank == 0, text
        assert seconds < SOON


def wait_for_silence(transport: Any, busy: float) -> Any:
    """Rank 0 waits for rank 1, which waits for rank 2, which is busy: all must name rank 2."""
    transport.open([Channel(1, 0, "B", 1, 0), Channel(2, 1, "B", 2, 1)])
    if transport.rank == 2:
        time.sleep(busy)
        with pytest.raises(PeerFailure, match="rebuilt"):
            transport.exchange(None)
        return None
    start = time.monotonic()
    with pytest.raises(PeerFailure) as caught:
        transport.receive(transport.rank, 0)
    return caught.value.rank, caught.value.cause, time.monotonic() - start


@pytest.mark.parametrize("kind", ["threads", *mostly_exhaustive(ON_PROCESSES, "distributed")])
def test_the_blame_goes_to_the_rank_at_the_end_of_the_chain_of_waits(kind: str) -> None:
    timeout, busy = (0.3, 0.6) if kind == "threads" else (4.0, 14.0)  # a rank that lacks a processor waits for longer
    for rank, cause, seconds in values(run(kind, wait_for_silence, ranks=3, timeout=timeout, busy=busy))[:2]:
        assert rank == 2
        assert f"silent for {timeout:g} s" in cause
        assert timeout * 0.9 < seconds < SOON


def device_waits_for_a_lost_rank(transport: Any, victim: int, how: int) -> Any:
    """The survivor's host waits for nobody that it knows of, as one that reads a number of its device does."""
    transport.open(PAIR)
    transport.describe_by(lambda: f"at {transport.rank}F0")
    transport.exchange(None)
    watch, ended = transport.watch, threading.Event()
    if transport.rank == victim:
        os.kill(os.getpid(), how)
    watch.abort_device = ended.set
    start = time.monotonic()
    watch.device_waiting = lambda: Waiting(victim, PAIR[victim], 0, start)
    released = ended.wait(SOON)
    return released, time.monotonic() - start, str(transport.broken)


def test_a_device_that_waits_for_a_rank_that_stands_still_is_released_and_the_rank_named() -> None:
    """A kernel that waits is no wait of the host: nobody looked at it, and it stayed for ever."""
    outcomes = run("distributed", device_waits_for_a_lost_rank, timeout=2.0, victim=1, how=signal.SIGSTOP)
    ((released, seconds, text),) = living(outcomes, 1)
    assert released
    assert seconds > 1.5
    assert "rank 1 failed" in text
    assert "silent for 2 s" in text


@pytest.mark.parametrize("kind", mostly_slow(["distributed", "distributed-tcp"], "distributed-tcp"))
@pytest.mark.parametrize("victim", mostly_slow([0, 1], 0))
def test_a_device_that_waits_for_a_rank_that_died_is_released_long_before_the_timeout(kind: str, victim: int) -> None:
    """Only a host that waits in gloo hears of a death. Where only its device waited, the rank was named at the
    timeout, and never if it hosted the store (rank 0 of `tcp`)."""
    outcomes = run(kind, device_waits_for_a_lost_rank, timeout=60.0, victim=victim, how=signal.SIGKILL)
    ((released, _, text),) = living(outcomes, victim)
    assert released
    assert f"rank {victim} failed" in text
    assert "died or left" in text


@pytest.mark.slow
def test_a_rank_that_stands_still_while_a_device_waits_is_released_though_the_store_is_silent() -> None:
    outcomes = run("distributed-tcp", device_waits_for_a_lost_rank, timeout=2.0, victim=0, how=signal.SIGSTOP)
    ((released, _, text),) = living(outcomes, 0)
    assert released
    assert "rank 0 failed" in text
