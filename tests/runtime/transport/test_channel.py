"""The ledger of a channel: what is due, what was posted, and what is none of both, on every transport."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transport_harness import run, values
from transports import KINDS, TRANSPORTS

from penstock.errors import MessageError, PeerFailure, UsageError
from penstock.runtime.transport import Channel

FORTH, BACK, SKIP = 0, 1, 2


CHANNELS = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0), Channel(0, 3, "F", 0, 1)]


def pair(transport: Any) -> None:
    transport.open(CHANNELS)


def fail_and_go_on(transport: Any) -> list[Any]:
    """Step 1 fails on rank 0 after one message; both drain; step 2 works on the same links."""
    pair(transport)
    said: list[Any] = []
    big = torch.ones(300_000)
    for step in range(4):
        failure = PeerFailure(0, "ValueError: boom", stage=0, action="0F1", microbatch=1, original_traceback="Trace")
        if transport.rank == 0:
            transport.send(FORTH, 0, big)
            for microbatch in (1, 2):
                if step == 1:
                    transport.send_failure(FORTH, microbatch, failure)
                else:
                    transport.send(FORTH, microbatch, big * microbatch)
        else:
            for microbatch in range(3):
                transport.post(FORTH, microbatch)
            assert torch.equal(transport.receive(FORTH, 0), big)
            if step == 1:
                with pytest.raises(PeerFailure, match="boom") as caught:
                    transport.receive(FORTH, 1)
                said += [caught.value.rank, caught.value.action, caught.value.original_traceback]
                said.append(transport.discard(FORTH, 2).cause)
            elif step == 2:
                said.append(transport.discard(FORTH, 1))  # data that nobody wants
                assert torch.equal(transport.receive(FORTH, 2), big * 2)
            else:
                assert torch.equal(transport.receive(FORTH, 2), big * 2)
                assert torch.equal(transport.receive(FORTH, 1), big)
        transport.flush()
        assert transport.exchange(("status", transport.rank)) == [("status", 0), ("status", 1)]
    assert transport.broken is None
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_takes_the_place_of_a_message_and_the_next_step_works(kind: str) -> None:
    outcomes = run(kind, fail_and_go_on)
    assert values(outcomes)[1] == [0, "0F1", "Trace", "ValueError: boom", None]


def drops_unposted(transport: Any) -> Any:
    pair(transport)
    for _ in range(2):
        if transport.rank == 0:
            for microbatch in range(3):
                transport.send(FORTH, microbatch, torch.full((microbatch + 2,), 1.0))
        else:
            assert transport.discard(FORTH, 0) is None
            assert transport.receive(FORTH, 1).shape == (3,)
            assert transport.discard(FORTH, 2) is None
        transport.exchange(None)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_was_never_posted_can_be_discarded(kind: str) -> None:
    assert values(run(kind, drops_unposted)) == [True, True]


def wrong_order(transport: Any) -> Any:
    pair(transport)
    if transport.rank == 0:
        transport.send(FORTH, 1, torch.ones(3))
        with pytest.raises(PeerFailure):  # told by rank 1, whichever call it is in
            transport.receive(BACK, 0)
    else:
        with pytest.raises(MessageError) as caught:
            transport.receive(FORTH, 0)
        assert transport.broken is not None
        with pytest.raises(PeerFailure, match="must be rebuilt"):
            transport.send(BACK, 0, None)
        return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_another_microbatch_than_the_due_one_is_an_error_and_never_data(kind: str) -> None:
    said = values(run(kind, wrong_order))[1]
    assert "was due" in said
    assert "microbatch 0" in said
    assert "microbatch 1" in said


def misuse(transport: Any) -> list[str]:
    pair(transport)
    said = []
    calls = [lambda: transport.open([Channel(0, 1, "F", 1, 1)]), lambda: transport.open([Channel(0, 1, "F", 0, 9)])]
    if transport.rank == 1:
        transport.post(FORTH, 0)
        calls += [lambda: transport.post(FORTH, 0), lambda: transport.open(CHANNELS[:1])]
    for call in calls:
        with pytest.raises(UsageError) as caught:
            call()
        said.append(str(caught.value))
    if transport.rank == 0:
        transport.send(FORTH, 0, None)
    else:
        transport.receive(FORTH, 0)
    transport.exchange(None)
    return said


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_misuse_is_named_and_leaves_the_links_as_they_were(kind: str) -> None:
    said = values(run(kind, misuse))[1]
    assert "hand-over" in said[0]
    assert "there are 2 ranks" in said[1]
    assert "1RECV_F0 is posted already" in said[2]
