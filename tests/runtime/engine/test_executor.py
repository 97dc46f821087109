"""The executor: a user's handlers, pairs that really overlap, and any schedule that was proved."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from processes import on_processes
from runtime.engine.numbers import WIDTH, numbers, pipeline, same, stages
from torch import Tensor
from torch.nn import functional as F

import penstock
from penstock.errors import PeerFailure
from penstock.runtime.engine.handlers import Context
from penstock.runtime.transport.interrupts import uninterrupted
from penstock.schedule import Action, Op, Schedule, build, lower


@pytest.mark.parametrize("drop", [0.0, 0.2])
def test_a_pair_may_run_on_two_threads_with_equal_results(drop: float) -> None:
    def build_pipe() -> penstock.Pipeline:
        return penstock.Pipeline(stages(4, drop), microbatches=6, schedule="dualpipe-v", loss_fn=F.mse_loss, seed=2)

    def result(pipe: penstock.Pipeline) -> list[Tensor]:
        torch.manual_seed(1)
        x, y = torch.randn(12, WIDTH), torch.randn(12, WIDTH)
        pipe.zero_grad()
        losses = [pipe.step(x, target=y).loss for _ in range(2)]
        found = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
        return [loss for loss in losses if loss is not None] + found

    wanted = result(build_pipe())
    used: set[int] = set()
    pairs = Counter[str]()
    with ThreadPoolExecutor(4) as pool:

        def overlap(action: Action, context: Context) -> None:
            context.fetch(action)
            first, second = action.parts()
            meeting = threading.Barrier(2)

            def half(part: Action) -> None:
                meeting.wait(10)  # both are under way at the same time
                used.add(threading.get_ident())
                context.compute(part)

            beside = pool.submit(half, second)
            half(first)
            beside.result()
            pairs[str(action.op)] += 1

        pipe = build_pipe()
        for op in (Op.OVERLAP_F_B, Op.OVERLAP_B_F):
            pipe.register(op, overlap)
        assert same(result(pipe), wanted)
    expected = Counter(
        str(action.op) for row in pipe.program.rows for action in row if action is not None and action.op.is_pair
    )
    assert pairs == {op: 2 * count for op, count in expected.items()}
    assert len(used) > 2


def test_a_schedule_object_a_lowered_one_and_a_file_run_alike(tmp_path: Any) -> None:
    named = numbers(pipeline("zb-v"))
    schedule = build("zb-v", 2, 4)
    assert same(numbers(pipeline(schedule, None)), named)
    assert same(numbers(pipeline(lower(schedule), None)), named)
    for name in ("schedule.csv", "schedule.json"):
        for value in (schedule, lower(schedule)):
            value.save(tmp_path / name)
            assert same(numbers(pipeline(str(tmp_path / name), None)), named)


def test_a_schedule_written_by_hand_runs() -> None:
    order = Schedule.from_text(
        """
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1I0 1F1 1W0 1I1 1F2 1I2 1W1 1W2
        2F0 2B0 2F1 2B1 2F2 2B2
        3F0 3B0 3F1 3B1 3F2 3B2
        """
    )
    torch.manual_seed(1)
    x, y = torch.randn(7, WIDTH), torch.randn(7, WIDTH)
    found, wanted = pipeline(order, None), pipeline("gpipe", 3)
    for pipe in (found, wanted):
        pipe.step(x, target=y)
    pairs = zip(found.parameters(), wanted.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)


def test_a_schedule_with_any_placement_runs() -> None:
    """Stages 0, 2 and 3 on rank 1: no family has that."""
    order = Schedule.from_text(
        """
        1F0 1F1 1B0 1B1
        0F0 0F1 2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1 0B0 0B1
        """
    )
    assert order.placement.by_stage == (1, 0, 1, 1)
    torch.manual_seed(1)
    x = torch.randn(4, WIDTH)
    found, wanted = pipeline(order, None), pipeline("gpipe", 2)
    for pipe in (found, wanted):
        pipe.step(x, target=x)
    pairs = zip(found.parameters(), wanted.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)


@uninterrupted
def ctrl_c_in_a_message() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(recorded: bool) -> list[str]:
    """The forwards of rank 0 in a step whose first send Ctrl-C arrives in."""
    seen: list[str] = []
    with penstock.Pipeline(stages(2), microbatches=4, loss_fn=F.mse_loss, timeout=30) as pipe:
        x = torch.ones(8, WIDTH)
        pipe.step(x, target=x)

        def forward(action: Action, context: Context) -> None:
            seen.append(str(action))
            context.run(action)

        def send(action: Action, context: Context) -> None:
            if pipe.rank == 0:
                ctrl_c_in_a_message()
            context.run(action)

        pipe.register("F", forward)
        pipe.register("SEND_F", send)
        expected = KeyboardInterrupt if pipe.rank == 0 else PeerFailure
        with pytest.raises(expected), pipe.record() if recorded else nullcontext():
            pipe.step(x, target=x)
    return seen


@pytest.mark.parametrize("recorded", [False, True])
def test_ctrl_c_that_comes_in_a_message_is_raised_before_the_next_action(recorded: bool) -> None:
    """Steps inside of record() ran in a loop of their own, which did not look for it until the step's end."""
    assert on_processes(2, interrupted, recorded)[0] == ["0F0"]
