"""Training with Ctrl-C at any line, on any rank, up to three: none waits, none is misnamed, no update is half made."""

from __future__ import annotations

import pytest
import torch
from interrupt_cases import CLIP, COSTS, TIMEOUT, Case, Life, draw_case, faults_of

from penstock.errors import PeerFailure, UsageError
from penstock.runtime.state.phase import NOW
from penstock.schedule import build
from penstock.tools.rehearsal.faults import PlannedFault, parse_fault
from penstock.tools.rehearsal.rehearse import rehearse
from penstock.tools.rehearsal.training import ProcessTime, rehearse_training

SAMPLE, SOME, ALL = 10, 200, 10_000


@pytest.mark.parametrize("first", range(0, SAMPLE, 5))
def test_nobody_waits_for_a_rank_that_was_interrupted(first: int) -> None:
    _check(range(first, first + 5))


def test_no_interrupt_comes_while_a_task_that_ended_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did (seeds 1731, 3073, 3775): its process then had the state of Ctrl-C of another."""
    time, switching, done = ProcessTime(seed=0), [], []
    restore = torch.set_rng_state

    def note(state: torch.Tensor) -> None:
        switching.append(time.is_switching)
        restore(state)

    def first() -> None:
        time.sleep(2.0)
        done.append(time.is_switching)

    monkeypatch.setattr(torch, "set_rng_state", note)
    time.start(0, first)
    time.start(1, lambda: time.sleep(1.0))
    time.run(lambda: bool(done), until=100)
    time.close()
    assert done == [False]
    assert len(switching) >= 2
    assert all(switching)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SAMPLE, SOME, 19))
def test_nobody_waits_in_some_hundreds_of_runs(first: int) -> None:
    _check(range(first, first + 19))


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(SOME, ALL, 100))
def test_nobody_waits_in_ten_thousand_runs(first: int) -> None:
    _check(range(first, first + 100))


def _check(seeds: range) -> None:
    wrong = {}
    for seed in seeds:
        case = draw_case(seed)
        found = faults_of(case)
        if found:
            wrong[seed] = (case.family, case.clip, [*map(str, case.faults)], found)
    assert not wrong
    assert NOW.phase is None  # A compute that was left would be seen by layers outside of any pipeline.


@pytest.mark.parametrize("clip", [CLIP, -1.0])
def test_one_in_a_computation_is_raised_there_and_training_goes_on(clip: float) -> None:
    case = Case("1f1b", 2, clip, True, [PlannedFault("interrupt", 7.0, 1)], 0)
    attempt, lives = case.run()
    assert [fault.kind for fault in attempt.struck] == ["interrupt"]
    assert [[type(error) for error in life.errors] for life in lives] == [[PeerFailure], [KeyboardInterrupt]]
    assert attempt.is_complete


@pytest.mark.parametrize("store_host", [None, 0])
def test_a_rank_that_was_stopped_and_goes_on_names_itself_as_the_others_do(store_host: int | None) -> None:
    """It found that the store was gone with rank 0, which had left because of it, and named that one."""
    schedule = build("1f1b", 3, 3)
    (attempt, *_) = rehearse_training(
        lambda rank: Life(Case("1f1b", 3, None, True, [], 0)).train(rank),
        schedule,
        COSTS,
        faults=[["stop 1 at 5 for 300"]],
        store_host=store_host,
        timeout=TIMEOUT,
    )
    assert [error.rank for error in attempt.errors if isinstance(error, PeerFailure)] == [1, 1, 1]


def test_it_is_written_as_other_faults_are_and_only_training_has_it() -> None:
    fault = parse_fault("interrupt 1 at 2.5 after 40")
    assert fault == PlannedFault("interrupt", 2.5, 1, lines=40)
    assert str(fault) == "interrupt 1 at 2.5 after 40"
    with pytest.raises(UsageError, match="'after' counts lines"):
        parse_fault("die 1 at 2.5 after 40")
    with pytest.raises(UsageError, match="only rehearse_training"):
        rehearse(build("1f1b", 2, 2), COSTS, faults=[fault])
