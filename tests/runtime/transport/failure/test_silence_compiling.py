"""The time that torch.compile takes is no silence. `timeout=` counted it: the first step of a compiled stage failed.

No compilation runs here: the tests say in dynamo's place that one begins and ends.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transport_harness import run, values
from transports import ON_PROCESSES

from penstock.errors import PeerFailure
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.failure import silence

CHANNELS = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)]


def receives_late(transport: Any, told: bool) -> Any:
    """Rank 1 is busy for twice the timeout, and rank 0 waits for it."""
    transport.open(CHANNELS)
    if transport.rank == 0:
        value = transport.receive(1, 0)
        transport.exchange(None)
        return value
    if told:
        silence.COMPILATIONS.begin()
    time.sleep(2 * transport.timeout)
    if told:
        silence.COMPILATIONS.end()
    transport.send(1, 0, torch.ones(1))
    transport.flush()
    transport.exchange(None)  # it does not leave before the other has it
    return None


@pytest.mark.parametrize(
    ("kind", "timeout"),
    [("threads", 0.2), *(pytest.param(kind, 4.0, marks=pytest.mark.slow) for kind in ON_PROCESSES)],
)
def test_a_rank_that_compiles_is_not_silent(kind: str, timeout: float) -> None:
    assert torch.equal(values(run(kind, receives_late, timeout=timeout, told=True))[0], torch.ones(1))


def test_a_rank_that_is_busy_with_anything_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence.COMPILATIONS, "_ended", float("-inf"))  # that of an earlier test
    error = run("threads", receives_late, timeout=0.2, told=False)[0].error
    assert isinstance(error, PeerFailure)
    assert "silent for 0.2 s" in str(error)


def test_a_compilation_that_never_ends_is_no_excuse_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    own = silence.Compilations()
    own.begin()
    assert own.is_under_way()
    monkeypatch.setattr(silence, "LONGEST_SECONDS", -1.0)
    assert not own.is_under_way()
