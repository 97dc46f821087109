"""`pipe.record()`: every compute of every rank, measured, as the same Timeline that a simulation gives."""

from __future__ import annotations

import os
import time
from collections import Counter
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import torch
from processes import on_processes
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import penstock
from penstock.errors import PeerFailure, UsageError
from penstock.runtime.engine import executor
from penstock.schedule import FAMILIES, Schedule, Timeline, simulate
from penstock.schedule.builders import TRAINING
from penstock.schedule.dependencies import makes, needs

WIDTH, M = 6, 4
TICK = 1e-4  # seconds: what reading a clock twice may differ by


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, WIDTH), torch.randn(8, WIDTH)


def pipeline(family: str = "1f1b", ranks: int = 2, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(ranks * FAMILIES[family].stages_per_rank)]
    return penstock.Pipeline(
        stages, schedule=family, ranks=ranks, microbatches=M, loss_fn=nn.functional.mse_loss, **options
    )


def recorded(family: str, ranks: int, **options: Any) -> Timeline:
    x, y = batch()
    with pipeline(family, ranks, **options) as pipe:
        pipe.step(x, target=y)
        with pipe.record() as timeline:
            pipe.step(x, target=y)
            pipe.step(x, target=y)
        return timeline


def computes(schedule: Schedule, rank: int) -> list[str]:
    return [str(part) for action in schedule.rows[rank] if action is not None for part in action.parts()]


def check(timeline: Timeline, schedule: Schedule) -> None:
    """One span a compute, in the order of the rows, and nothing before what it needs."""
    assert isinstance(timeline, Timeline)
    assert len(timeline.by_rank) == schedule.ranks
    ends = {}
    for span in timeline.spans:
        assert span.start <= span.end
        assert span.wait >= 0
        for value in makes(span.action.op):
            ends[value, span.action.stage, span.action.microbatch] = span.end
    for rank, row in enumerate(timeline.by_rank):
        assert [str(span.action) for span in row] == computes(schedule, rank)
        for before, after in pairwise(row):
            assert after.start >= before.end  # one at a time
            assert after.start - after.wait >= before.end - TICK  # and what it waited for came in between
    for span in timeline.spans:
        for value, stage in needs(span.action.op, span.action.stage, schedule.topology):
            assert span.start >= ends[value, stage, span.action.microbatch] - TICK
    assert 0 < max(timeline.busy) <= timeline.makespan
    assert 0 <= timeline.bubble < 1
    assert timeline.critical_path


@pytest.mark.parametrize("family", TRAINING)
def test_on_threads_there_is_one_span_for_each_compute_in_the_order_of_the_schedule(family: str) -> None:
    timeline = recorded(family, 2, transport="threads")
    check(timeline, timeline.schedule)


def on_a_process() -> tuple[list[Timeline], bool, str]:
    """All that is asked of a process: two records, whether its labels are right, and a record on one rank only."""
    timelines = [recorded(family, 2) for family in ("1f1b", "dualpipe-v")]
    with pipeline() as pipe:
        right = labels(pipe) == wanted(pipe, list(pipe.deployment.ranks.executors))
        x, y = batch()
        said = ""
        if 0 not in pipe.deployment.ranks.executors:
            pipe.step(x, target=y)
        else:
            try:
                with pipe.record():
                    pipe.step(x, target=y)
            except UsageError as error:
                said = str(error)
    return timelines, right, said


@pytest.fixture(scope="module")
def two_processes() -> list[tuple[list[Timeline], bool, str]]:
    return on_processes(2, on_a_process)


def test_on_processes_every_rank_has_the_spans_of_all_ranks(two_processes: list[Any]) -> None:
    (mine, _, _), (theirs, _, _) = two_processes
    for here, there in zip(mine, theirs, strict=True):
        check(here, here.schedule)
        assert here.spans == there.spans


def test_a_rank_that_does_not_record_is_named(two_processes: list[Any]) -> None:
    assert "rank 1 did not record the step" in two_processes[0][2]


@pytest.mark.parametrize("family", TRAINING)
def test_a_simulation_and_a_record_can_be_laid_over_each_other(family: str) -> None:
    measured = recorded(family, 2, transport="threads")
    predicted = simulate(measured.schedule)
    assert type(predicted) is type(measured)
    assert [[(span.rank, span.action) for span in row] for row in measured.by_rank] == [
        [(span.rank, span.action) for span in row] for row in predicted.by_rank
    ]
    assert measured.peak_activations == predicted.peak_activations


def test_the_halves_of_an_overlapped_pair_have_spans_of_their_own() -> None:
    timeline = recorded("dualpipe-v", 2, transport="threads")
    pairs = [action for row in timeline.schedule.rows for action in row if action is not None and action.op.is_pair]
    assert pairs
    spans = Counter(str(span.action) for span in timeline.spans)
    for pair in pairs:
        for part in pair.parts():
            assert spans[str(part)] == 1


def test_what_a_rank_waits_is_its_wait_and_not_its_work() -> None:
    x, y = batch()
    with pipeline("gpipe", transport="threads") as pipe:
        pipe.step(x, target=y)
        pipe.deployment.staged.parts[0].module.register_forward_hook(lambda *_: time.sleep(0.2))
        with pipe.record() as timeline:
            pipe.step(x, target=y)
    slow, quick = ([span for span in row if span.action.op.name == "F"] for row in timeline.by_rank)
    assert all(span.length >= 0.2 for span in slow)
    assert median(span.wait for span in slow) < 0.1
    assert median(span.wait for span in quick) > 0.1
    assert median(span.length for span in quick) < 0.1


def test_a_record_holds_the_last_step_and_stays_as_it_was() -> None:
    x, y = batch()
    with pipeline(transport="threads") as pipe:
        with pipe.record() as timeline:
            assert timeline.spans == ()
            pipe.step(x, target=y)
            first = timeline.spans
            pipe.step(x, target=y)
            second = timeline.spans
        assert len(first) == len(second) == 2 * 2 * M
        assert first[0].end < second[0].start
        pipe.step(x, target=y)
        assert timeline.spans is second


def test_a_failed_step_leaves_the_record_of_the_one_before() -> None:
    x, y = batch()
    with pipeline(transport="threads") as pipe, pipe.record() as timeline:
        pipe.step(x, target=y)
        kept = timeline.spans
        hook = pipe.deployment.staged.parts[1].module.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(PeerFailure):
            pipe.step(x, target=y)
        hook.remove()
        assert timeline.spans is kept
        pipe.step(x, target=y)
        check(timeline, pipe.schedule)


def test_not_recording_reads_no_clock_and_keeps_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = batch()
    with pipeline(transport="threads") as pipe:
        with pipe.record():
            pipe.step(x, target=y)

        def never(*_: Any) -> None:
            raise AssertionError("a step that nobody records made a span")

        monkeypatch.setattr(executor, "Span", never)
        monkeypatch.setattr(executor.Executor, "_timed", never)
        pipe.step(x, target=y)
        assert all(each.computations.report.spans is None for each in pipe.deployment.ranks.executors.values())


def test_recording_changes_no_number() -> None:
    x, y = batch()
    found = []
    for records in (False, True):
        with pipeline("zb-v", transport="threads") as pipe:
            if records:
                with pipe.record():
                    loss = pipe.step(x, target=y).loss
            else:
                loss = pipe.step(x, target=y).loss
            found.append([loss, *(parameter.grad for parameter in pipe.parameters())])
    assert all(torch.equal(here, there) for here, there in zip(*found, strict=True))  # type: ignore[arg-type]


# -- labels for torch.profiler


def labels(pipe: penstock.Pipeline, **options: Any) -> Counter[str]:
    x, y = batch()
    pipe.step(x, target=y)
    with profile(activities=[ProfilerActivity.CPU], **options) as found:
        pipe.step(x, target=y)
    return Counter(event.name for event in found.events() if event.name.startswith("penstock "))


def wanted(pipe: penstock.Pipeline, ranks: list[int]) -> Counter[str]:
    """Every action of the program, transfers too; of a pair that no handler overlaps, the halves."""
    actions = [action for rank in ranks for action in pipe.program.rows[rank] if action is not None]
    return Counter(f"penstock {part}" for action in actions for part in action.parts())


@pytest.mark.parametrize("family", ["1f1b", "dualpipe-v"])
def test_a_profile_of_all_threads_shows_one_label_for_each_action(family: str) -> None:
    with pipeline(family, transport="threads") as pipe:
        found = labels(pipe, experimental_config=_ExperimentalConfig(profile_all_threads=True))
        assert found == wanted(pipe, [0, 1])


def test_a_profile_of_a_process_shows_one_label_for_each_action_of_its_rank(two_processes: list[Any]) -> None:
    assert [right for _, right, _ in two_processes] == [True, True]


def test_the_cores_that_ranks_share_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 3, 5})
    assert recorded("1f1b", 2, transport="threads").cores == 3


def pinned() -> int:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.cpu_count = lambda: 8  # type: ignore[assignment]
    return recorded("1f1b", 2).cores


def test_processes_that_are_pinned_to_a_core_each_share_none() -> None:
    assert on_processes(2, pinned) == [0, 0]
