"""The exchange that ends a step: every rank has every rank's value, and hears of what went wrong."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deadlines import SOON
from transport_harness import run, values
from transports import KINDS, ON_PROCESSES, TRANSPORTS

from penstock.errors import MessageError, PeerFailure, PenstockError
from penstock.runtime.transport import Channel

PAIR = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)]


def different_counts(transport: Any) -> str:
    transport.open(PAIR)
    if transport.rank == 0:
        transport.send(0, 0, torch.ones(2))
        transport.send(0, 1, torch.ones(2))
    else:
        transport.receive(0, 0)
    with pytest.raises(MessageError) as caught:
        transport.exchange(None)
    assert transport.broken is not None
    return str(caught.value)


@pytest.mark.parametrize("kind", ON_PROCESSES)
def test_ranks_that_ran_different_programs_are_told_at_the_end_of_the_step(kind: str) -> None:
    for said in values(run(kind, different_counts)):
        assert "rank 0 sent 2 and rank 1 took 1" in said


CHANNELS = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0), Channel(0, 3, "F", 0, 1)]


def pair(transport: Any) -> None:
    transport.open(CHANNELS)


def exchange_sizes(transport: Any) -> bool:
    for size in (0, 10, 489, 490, 5000, 100_000):
        said = transport.exchange((transport.rank, "x" * size))
        assert said == [(rank, "x" * size) for rank in range(transport.ranks)]
    return True


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_exchange_gives_every_rank_every_value_of_any_size(kind: str, ranks: int) -> None:
    assert values(run(kind, exchange_sizes, ranks=ranks)) == [True] * ranks


def hears_of_it(transport: Any) -> Any:
    """Rank 0 waits for nobody; it must still hear that rank 1's step has failed."""
    pair(transport)
    transport.describe_by(lambda: f"at {transport.rank}F0")
    if transport.rank == 1:
        transport.announce(PeerFailure(1, "ValueError: boom"))
    start = time.monotonic()
    while not transport.news and time.monotonic() < start + SOON:
        time.sleep(0.01)
    heard = [failure.cause for failure in transport.news]
    transport.exchange(None)
    return heard


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_rank_that_waits_for_nobody_hears_of_a_failed_step(kind: str) -> None:
    for heard in values(run(kind, hears_of_it)):
        assert heard == ["ValueError: boom"]


# -- an exchange that is collected later


def posted_and_collected(transport: Any) -> list[Any]:
    """Messages of the next step, of other sizes, travel between the post of an exchange and the look at its answers.

    When those are looked at, this rank is ready for what comes at the end of the next step too. The last answers take
    more than one message.
    """
    channels = [Channel(0, 1, "F", 0, 1)]
    collected = []
    late: Any = None
    for step in range(4):
        transport.open(channels)
        if transport.rank == 0:
            transport.send(0, 0, torch.full((step + 1, 2000), float(step)))
        elif transport.rank == 1:
            transport.post(0, 0)
            assert torch.equal(transport.receive(0, 0), torch.full((step + 1, 2000), float(step)))
        transport.flush()
        if late is not None:
            collected.append(late())
            assert late() is collected[-1]  # it may be asked for again
        late = transport.post_exchange((transport.rank, step, "x" * 4000 * step))
    with_rest = transport.exchange("together")  # which collects what is left first
    return [*collected, late(), with_rest]


@pytest.mark.parametrize("kind", KINDS)
def test_an_exchange_may_be_collected_when_the_next_step_has_run(kind: str) -> None:
    first, second, third = values(run(kind, posted_and_collected, ranks=3))
    assert first == second == third
    assert first[:4] == [[(rank, step, "x" * 4000 * step) for rank in range(3)] for step in range(4)]
    assert first[4] == ["together"] * 3


def known_before_collected(transport: Any) -> list[Any]:
    """What each rank knows of an exchange when it has posted, rank 0 after all others; and what it collects."""
    store, seen = dist.distributed_c10d._get_default_store(), []
    for step in range(3):
        transport.open(CHANNELS[:2])
        if transport.rank == 0:
            store.wait([f"posted {step} by {rank}" for rank in range(1, transport.ranks)])
        late = transport.post_exchange((transport.rank, step))
        store.set(f"posted {step} by {transport.rank}", "yes")
        known = transport.known_answers()
        assert late() == [(rank, step) for rank in range(transport.ranks)]
        seen.append(known == late())
        assert known is None or seen[-1]
        assert transport.known_answers() is None  # of an exchange that is collected
    return seen


@pytest.mark.parametrize("kind", ON_PROCESSES)
def test_a_coordinator_that_posts_last_knows_all_answers_at_once_on_one_host(kind: str) -> None:
    """Before there are sockets, in the first exchange, and over gloo, nobody can tell without a wait."""
    first, *others = values(run(kind, known_before_collected, ranks=3))
    assert first[1:] == [kind == "shared"] * 2
    assert others == [[False] * 3] * 2


def dies_before_it_is_answered(transport: Any) -> Any:
    """Rank 1 is killed when rank 0, which knows what it has said, is about to answer: what rank 0 knows, and raises."""
    store = dist.distributed_c10d._get_default_store()
    transport.open(PAIR)
    transport.exchange(None)
    if transport.rank == 1:
        late = transport.post_exchange(None)
        store.set("victim", str(os.getpid()))
        return late()
    victim, sockets = int(store.get("victim")), transport._exchanger.sockets
    answer = sockets.put_exchange

    def put_exchange(*arguments: Any) -> None:
        sockets.put_exchange = answer
        os.kill(victim, signal.SIGKILL)
        closed = select.poll()
        closed.register(sockets[1], 0)  # that it is closed is told in any case
        assert closed.poll(SOON * 1000)
        answer(*arguments)

    sockets.put_exchange = put_exchange
    late = transport.post_exchange(None)
    known = transport.known_answers()
    with pytest.raises(PeerFailure) as caught:
        late()
    return known, caught.value.rank


def test_a_rank_that_dies_before_it_is_answered_is_named_when_the_exchange_is_collected() -> None:
    """The look that waits for nobody raised, between the count of a step and its update."""
    outcomes = run("shared", dies_before_it_is_answered)
    assert outcomes[1].silent
    assert outcomes[0].get() == (None, 1)


def one_step_apart(transport: Any) -> str:
    """Rank 0 runs a step more than rank 1 has a message for: the counts of that step do not match."""
    transport.open([Channel(0, 1, "F", 0, 1)])
    if transport.rank == 0:
        transport.send(0, 0, 1.0)
    late = transport.post_exchange(None)
    try:
        late()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("kind", ON_PROCESSES)
def test_a_message_that_nobody_took_is_told_when_the_exchange_is_collected(kind: str) -> None:
    for said in values(run(kind, one_step_apart)):
        assert "rank 0 sent 1 and rank 1 took 0" in said


def what_a_waiting_rank_says_of_its_call(transport: Any) -> list[int]:
    """Rank 0 posts an exchange and waits for its answers; rank 1 takes part once rank 0 is seen waiting."""
    store = dist.distributed_c10d._get_default_store()
    seen: list[int] = []

    def look() -> None:
        end = time.monotonic() + SOON
        while transport.watch.waiting is None and time.monotonic() < end:
            time.sleep(0.01)
        seen.append(transport.watch.own.state(transport.watch.waiting).step)
        store.set("looked", "yes")

    transport.call = "settle()"
    if transport.rank == 1:
        store.wait(["looked"])
        transport.post_exchange(None)()
        return []
    looker = threading.Thread(target=look)
    late = transport.post_exchange(None)
    looker.start()
    late()
    looker.join()
    return [*seen, transport.watch.own.state(None).step]


@pytest.mark.parametrize("kind", ON_PROCESSES)
def test_a_call_is_compared_with_those_that_make_the_same_exchange(kind: str) -> None:
    """A rank that waited for a slow update after train_steps() was taken to make the next exchange in settle(), too.

    If that was the one of a slow step, a run with nothing wrong in it ended with "different calls".
    """
    assert values(run(kind, what_a_waiting_rank_says_of_its_call))[0] == [0, 1]
