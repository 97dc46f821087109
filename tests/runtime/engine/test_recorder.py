"""Recording: all ranks' spans, sends and walls, on one clock."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deadlines import SOON
from processes import on_processes
from recorded import pipeline, record
from torch import nn

import penstock
from penstock.errors import UsageError
from penstock.runtime.engine.recorder import host_name, offsets
from penstock.runtime.transport import ThreadTransport
from penstock.schedule import Op, Timeline


def check(timeline: Timeline) -> None:
    """Every compute and send is there once; nobody uses what is not made; ranks do one thing at a time."""
    parts = [part for _, _, part in timeline.schedule.parts()]
    assert sorted(span.action for span in timeline.spans) == sorted(parts)
    assert {span.action.op for span in timeline.chores} <= {Op.SEND_F, Op.SEND_B}
    for span in timeline.spans:
        for _, maker in timeline.needed_by(span):
            assert maker.end <= span.start
    for rank, wall in enumerate(timeline.walls):
        mine = sorted([*timeline.by_rank[rank], *(span for span in timeline.chores if span.rank == rank)], key=_start)
        for one, two in pairwise(mine):
            assert one.end <= two.start - two.wait + 1e-9
        assert wall.start <= mine[0].start - mine[0].wait
        assert mine[-1].end <= wall.end <= wall.done


def _start(span: Any) -> float:
    return float(span.start)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe-v"])
def test_threads_are_recorded_whole(schedule: str) -> None:
    with pipeline([0.0] * 4, schedule=schedule) as pipe:
        timeline = record(pipe)
    assert timeline.unit == "s"
    check(timeline)


def test_the_optimizer_between_two_steps_is_measured() -> None:
    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            time.sleep(0.02)
            return super().step(closure)

    with pipeline([0.0, 0.0]) as pipe:
        optimizer = Slow(pipe.parameters(), lr=0.1)
        x = torch.randn(12, 4)
        with pipe.record() as timeline:
            pipe.step(x, target=x)
            first = timeline.walls
            optimizer.step()
            pipe.step(x, target=x)
        optimizer.step()
    assert [wall.optimizer for wall in first] == [0.0, 0.0]
    assert all(0.02 <= wall.optimizer < wall.done - wall.start for wall in timeline.walls)


def test_a_step_outside_is_not_recorded() -> None:
    with pipeline([0.0, 0.0]) as pipe:
        timeline = record(pipe)
        before = timeline.spans
        x = torch.randn(12, 4)
        pipe.step(x, target=x)
    assert timeline.spans is before


def on_gloo(everywhere: bool) -> Any:
    torch.manual_seed(0)
    stages = [nn.Linear(8, 8) for _ in range(4)]
    pipe = penstock.Pipeline(stages, microbatches=6, schedule="zb-v", loss_fn=F.mse_loss, timeout=20)
    x = torch.randn(12, 8)
    try:
        if not everywhere and torch.distributed.get_rank() == 1:
            pipe.step(x, target=x)
            return None
        with pipe.record() as timeline:
            pipe.step(x, target=x)
            if everywhere:
                pipe.step(x, target=x)
    except UsageError as error:
        return str(error)
    finally:
        pipe.close()
    return timeline


def test_processes_of_one_host_record_the_same_timeline() -> None:
    one, two = on_processes(2, on_gloo, True)
    check(one)
    assert one.spans == two.spans
    assert one.chores == two.chores


def test_a_rank_that_does_not_record_is_named() -> None:
    told, _ = on_processes(2, on_gloo, False)
    assert told == "rank 1 did not record the step; enter pipe.record() on every rank"


def test_clocks_of_several_hosts_are_aligned_within_the_stated_error() -> None:
    ahead = [0.0, 1234.5, -77.25]
    group = ThreadTransport.group(3)
    found: list[Any] = [None] * 3

    def work(rank: int) -> None:
        found[rank] = offsets(group[rank], lambda: time.perf_counter() + ahead[rank])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for shifts, error in found:
        assert 0 < error < SOON
        assert shifts == pytest.approx(ahead, abs=error)
    assert found[0] == found[1] == found[2]


def on_two_hosts() -> Timeline:
    """Two processes that say they are on different hosts, one of them with a clock that is an hour ahead."""
    from penstock.parallel.group import world
    from penstock.runtime.engine import computations, executor, recorder

    rank = torch.distributed.get_rank()

    def clock() -> float:
        return time.perf_counter() + 3600.0 * rank

    world.host_name = lambda: f"host {rank}"
    computations.perf_counter = executor.perf_counter = recorder.perf_counter = clock
    recorder.offsets.__defaults__ = (clock,)
    result = on_gloo(True)
    assert isinstance(result, Timeline)
    return result


def test_a_run_on_two_hosts_is_on_one_clock() -> None:
    one, two = on_processes(2, on_two_hosts)
    assert 0 < one.clock_error < SOON
    assert one.makespan < 600  # and not an hour
    assert one.spans == two.spans
    for span in one.spans:
        for _, maker in one.needed_by(span):
            assert maker.end <= span.start + 2 * one.clock_error


def test_one_host_has_one_name() -> None:
    assert host_name() == host_name() != ""
