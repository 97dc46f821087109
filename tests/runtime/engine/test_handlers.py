"""What a handler of the user's own sees of the step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from processes import on_processes
from runtime.engine.numbers import WIDTH, numbers, pipeline, same
from torch import nn
from transports import ON_PROCESSES

import penstock
from penstock.errors import PeerFailure
from penstock.runtime.engine.handlers import Context
from penstock.schedule import Action, Op, build


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64).double() for _ in range(4)))


def trained(**given: Any) -> dict[str, Any]:
    """Two steps with a handler for backwards, of overlapped pairs too; the gradients, and what the handler saw."""
    schedule = build("interleaved-1f1b", 2, 4, 2, overlap_b_f=True)
    model = layers()
    pipe = penstock.Pipeline(model, stages=4, schedule=schedule, loss_fn=nn.functional.mse_loss, **given)
    programs, sends = [], set()

    def look(action: Any, context: Any) -> None:
        programs.append(context.schedule is pipe.program)
        sends.update(context.sends)
        context.run(action)

    for op in (Op.B, Op.OVERLAP_B_F):
        pipe.register(op, look)
    x = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for parameter in pipe.parameters():
            parameter.grad = None
        pipe.step(x, target=x)
    plain = layers()
    nn.functional.mse_loss(plain(x), x).backward()
    wanted = dict(plain.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad)
    pipe.close()
    return {"programs": programs, "sends": sends}


def on_a_rank() -> dict[str, Any]:
    return {transport: trained(transport=transport) for transport in ON_PROCESSES}


def test_a_handler_sees_the_program_and_the_sends_under_way() -> None:
    found = trained(ranks=2)
    assert found["programs"]
    assert all(found["programs"])
    assert found["sends"] == set()  # threads hand values over
    for rank in on_processes(2, on_a_rank):
        assert all(rank["distributed"]["programs"] + rank["shared"]["programs"])
        assert rank["distributed"]["sends"]
        assert {microbatch for _, microbatch in rank["distributed"]["sends"]} <= set(range(4))
        assert rank["shared"]["sends"] == set()  # values are copied at once


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
