"""The ranks of a process: late ones, ones that never come back, and steps inside of steps."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from deadlines import SOON, TIMEOUT
from faults.on_threads import M, assert_clean, assert_told, fail, pipeline
from faults.traps import batch, differing, plain_gradients, trap_of
from tiers import mostly_slow

from penstock.errors import RunError
from penstock.runtime.engine import rank_threads
from penstock.runtime.engine.ranks import calling
from penstock.runtime.transport import ThreadTransport


@contextmanager
def no_thread_left() -> Iterator[None]:
    gc.collect()
    before = set(threading.enumerate())
    yield
    gc.collect()
    deadline = time.monotonic() + SOON
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == set()


def test_a_pipeline_of_one_rank_fails_and_recovers_too() -> None:
    with pipeline(stages=1, ranks=1) as pipe:
        trap_of(pipe, 0).set("backward", 2)
        assert_told(fail(pipe), pipe, 0, "B", 2)
        assert_clean(pipe)


def busy(seconds: float, action: Callable[[], Any] = lambda: None) -> Callable[[], None]:
    def spring() -> None:
        action()
        time.sleep(seconds)

    return spring


@pytest.mark.parametrize(
    ("stage", "warm"), mostly_slow(itertools.product([0, 1, 2], [False, True]), (0, False), (2, True))
)
def test_a_stalled_rank_is_named_at_the_timeout(stage: int, warm: bool) -> None:
    """In the first step a forward has the random numbers alone, so the other ranks wait for that and for no message."""
    began: list[float] = []
    with no_thread_left(), pipeline(timeout=1.5) as pipe:
        if warm:
            assert_clean(pipe)
        trap_of(pipe, stage).set("forward", 1, busy(3.0, lambda: began.append(time.monotonic())))
        failure = fail(pipe)
        took = time.monotonic() - began[0]
        assert (failure.rank, failure.stage, failure.action, failure.microbatch) == (stage, stage, f"{stage}F1", 1)
        assert f"rank {stage} failed (stage {stage}, action {stage}F1, microbatch 1): silent for 1.5 s" in str(failure)
        assert "the group must be rebuilt" not in str(failure)  # threads have none: the next step works
        assert failure.report is not None
        assert f"rank {stage}: at {stage}F1, last finished" in failure.report
        assert failure.report.count("waiting for rank") >= 1
        assert took > 1.2
        assert_clean(pipe)


def test_a_rank_that_does_not_come_back_does_not_hold_the_step_nor_spoil_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_threads, "GRACE", 0.5)
    release = threading.Event()
    with no_thread_left(), pipeline(timeout=1.5) as pipe:
        assert_clean(pipe)
        trap_of(pipe, 1).set("backward", 1, lambda: release.wait(TIMEOUT))
        assert fail(pipe).rank == 1
        x, y = batch()
        with pytest.raises(RunError, match="are still running their own code after a step that failed"):
            pipe.step(x, target=y)
        with pytest.raises(RunError, match="make a new Pipeline"):
            pipe.evaluate(x, target=y)
        release.set()
        pipe.step(x, target=y)
        assert differing(pipe, plain_gradients(3, M)) == []  # also of what the late rank added when it came back


def test_a_step_inside_a_step_is_refused() -> None:
    with pipeline() as pipe:
        x, y = batch()
        trap_of(pipe, 0).set("forward", 0, lambda: pipe.step(x, target=y))
        failure = fail(pipe)
        assert "in a step already" in failure.cause
        assert_clean(pipe)


def test_the_outer_call_counts_and_is_over_when_it_raises() -> None:
    transport = ThreadTransport.group(1)[0]
    with calling(transport, "step()"):
        with pytest.raises(ZeroDivisionError), calling(transport, "grad_norm()"):
            _ = 1 / len(transport.call.removeprefix("step()"))  # it is in step(), so that nothing is left
        assert transport.call == "step()"
    assert transport.call == ""
