"""The executor: a user's handlers, pairs that really overlap, and any schedule that was proved."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PeerFailure
from penstock.runtime.engine.handlers import Context
from penstock.schedule import Action, Op, Schedule, build, lower

WIDTH = 5


def stages(count: int = 4, drop: float = 0.2) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(drop), nn.Tanh()) for _ in range(count)]


def pipeline(schedule: str | Schedule, microbatches: int | None = 4, **options: Any) -> penstock.Pipeline:
    return penstock.Pipeline(
        stages(), microbatches=microbatches, schedule=schedule, loss_fn=F.mse_loss, seed=2, **options
    )


def numbers(pipe: penstock.Pipeline) -> list[Tensor]:
    """The loss and all gradients of one step on the same batch."""
    torch.manual_seed(1)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    pipe.zero_grad()
    pipe.deployment.clock.step = 0
    loss = pipe.step(x, target=y).loss
    assert loss is not None
    return [loss, *(parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None)]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("op", "schedule"), [(op, "zb-v") for op in list(Op)[:8] if op is not Op.B] + [(Op.B, "1f1b")])
def test_a_handler_gets_every_action_of_its_op_and_none_brings_the_default_back(op: Op, schedule: str) -> None:
    pipe = pipeline(schedule)
    wanted = numbers(pipe)
    seen: Counter[Action] = Counter()

    def handler(action: Action, context: Context) -> None:
        seen[action] += 1
        context.run(action)

    pipe.register(op, handler)
    assert same(numbers(pipe), wanted)
    expected = [action for row in pipe.program.rows for action in row if action is not None and action.op is op]
    assert expected
    assert seen == Counter(expected)
    pipe.register(op, None)
    assert same(numbers(pipe), wanted)
    assert seen == Counter(expected)


def test_a_handler_is_given_the_steps_data() -> None:
    pipe = pipeline("1f1b")
    seen: list[Any] = []

    def handler(action: Action, context: Context) -> None:
        context.run(action)
        if action.stage == 3:
            batch = context.batch
            seen.append(
                (context.rank, sorted(context.stages), batch.targets[action.microbatch].shape, len(context.losses))
            )
            assert all(isinstance(pair, tuple) for pair in context.transfers)

    pipe.register(Op.F, handler)
    numbers(pipe)
    assert seen == [(3, [3], (2, WIDTH), count) for count in (1, 2, 3, 4)]


def test_a_handler_that_does_not_do_its_work_is_a_failure_and_no_wrong_number() -> None:
    pipe = pipeline("1f1b")
    wanted = numbers(pipe)
    skipped: list[Action] = []
    pipe.register(Op.B, lambda action, context: skipped.append(action))
    with pytest.raises(PeerFailure):
        numbers(pipe)  # nothing is there to send back
    assert skipped
    pipe.register(Op.B, None)
    assert same(numbers(pipe), wanted)


@pytest.mark.parametrize(
    ("schedule", "op", "left_out"),
    [
        ("1f1b", Op.B, "0B2"),  # nobody waits for the gradient of the model's own input,
        ("zb-v", Op.W, "2W1"),  # nor for that of a weight
        ("dualpipe-v", Op.OVERLAP_F_B, "0B1"),
        ("dualpipe-v", Op.B, "0B1"),  # half of a pair, by the handler of its own op
        ("zb-h1", Op.I, "0I1"),
    ],
)
def test_a_compute_that_a_handler_leaves_out_is_a_failure_even_if_nobody_waits_for_its_result(
    schedule: str, op: Op, left_out: str
) -> None:
    pipe = pipeline(schedule)
    wanted = numbers(pipe)
    missed: list[str] = []

    def handler(action: Action, context: Context) -> None:
        context.fetch(action)
        for part in action.parts():
            if str(part) == left_out:
                missed.append(left_out)
            else:
                context.compute(part)

    pipe.register(op, handler)
    with pytest.raises(PeerFailure, match="RunError") as caught:
        numbers(pipe)
    assert missed == [left_out]
    assert caught.value.action in (left_out, left_out.replace("I", "W"))  # without its I, the W finds nothing
    pipe.register(op, None)
    assert same(numbers(pipe), wanted)


def test_a_forward_that_a_handler_leaves_out_of_an_evaluation_is_a_failure() -> None:
    pipe = pipeline("1f1b")
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    wanted = pipe.evaluate(x, target=y).loss
    pipe.register(Op.F, lambda action, context: None if str(action) == "3F2" else context.run(action))
    with pytest.raises(PeerFailure, match="a handler did not run 3F2") as caught:
        pipe.evaluate(x, target=y)
    assert (caught.value.rank, caught.value.action) == (3, "3F2")
    pipe.register(Op.F, None)
    assert torch.equal(pipe.evaluate(x, target=y).loss, wanted)


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


def test_an_error_in_a_handler_is_told_with_its_action() -> None:
    pipe = pipeline("1f1b")
    wanted = numbers(pipe)

    def broken(action: Action, context: Context) -> None:
        if action.stage == 3:
            raise KeyError("mine")
        context.run(action)

    pipe.register(Op.B, broken)
    with pytest.raises(PeerFailure, match=r"rank 3 failed \(stage 3, action 3B0, microbatch 0\): KeyError: 'mine'"):
        numbers(pipe)
    pipe.register(Op.B, None)
    assert same(numbers(pipe), wanted)


# --- schedules that did not come from a name


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
