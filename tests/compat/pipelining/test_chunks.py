"""Functions in the place of actions, written as for torch: they wait, run the stage and hand on by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compat.torch_shaped import check, manual, vee
from processes import on_processes
from torch import nn

from penstock.compat.pipelining import PipelineStage, ScheduleDualPipeV, ScheduleInterleavedZeroBubble
from penstock.compat.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    _wait_batch_p2p,
)
from penstock.errors import PeerFailure, UsageError


class ByHand:
    """Does what torch's own code does for each action, and notes it."""

    def __init__(self, threads: bool = False) -> None:
        self.threads = threads
        self.seen: list[str] = []

    def forward(self, action: Any, ctx: Any) -> None:
        schedule, number = ctx.schedule_ref, action.microbatch_index
        stages = {each.stage_index: each for each in schedule._stages}
        stage = stages[action.stage_index]
        schedule._assert_unsharded(stage)
        if not stage.is_first and stage.stage_index - 1 not in stages:
            assert (stage.stage_index, number) in schedule.fwd_recv_ops
            _wait_batch_p2p(schedule.fwd_recv_ops.pop((stage.stage_index, number)))
        output = stage.forward_one_chunk(number, ctx.arg_mbs[number], ctx.kwarg_mbs[number])
        assert output.requires_grad
        schedule._maybe_compute_loss(stage, output, ctx.target_mbs, number)
        if stage.stage_index + 1 in stages:
            stages[stage.stage_index + 1].set_local_fwd_input(output, number)
        self.seen.append(str(action))

    def backward(self, action: Any, ctx: Any) -> None:
        schedule, number = ctx.schedule_ref, action.microbatch_index
        stages = {each.stage_index: each for each in schedule._stages}
        stage = stages[action.stage_index]
        if not stage.is_last and stage.stage_index + 1 not in stages:
            assert (stage.stage_index, number) in schedule.bwd_recv_ops
            _wait_batch_p2p(schedule.bwd_recv_ops.pop((stage.stage_index, number)))
        loss = schedule._maybe_get_loss(stage, number)
        assert (loss is not None) == stage.is_last
        schedule.backward_counter[stage.stage_index] += 1
        last = schedule.backward_counter[stage.stage_index] == schedule._n_microbatches
        whole = action.computation_type == FULL_BACKWARD
        stage.backward_one_chunk(number, loss=loss, full_backward=whole, last_backward=last)
        if last:
            stage.scale_grads(schedule._n_microbatches if schedule.scale_grads else 1)
        if stage.stage_index - 1 in stages:
            stages[stage.stage_index - 1].set_local_bwd_input(stage.get_local_bwd_output(number), number)
        self.seen.append(str(action))

    def weights(self, action: Any, ctx: Any) -> None:
        stage = {each.stage_index: each for each in ctx.schedule_ref._stages}[action.stage_index]
        stage.backward_weight_one_chunk(action.microbatch_index)
        self.seen.append(str(action))

    def pair(self, action: Any, ctx: Any) -> None:
        first, second = action.sub_actions
        if not self.threads:
            self.forward(first, ctx)
            self.backward(second, ctx)
            return
        beside = threading.Thread(target=self.backward, args=(second, ctx))
        beside.start()
        self.forward(first, ctx)
        beside.join()

    def take(self, schedule: Any) -> None:
        schedule.register_custom_function(FORWARD, self.forward)
        schedule.register_custom_function(OVERLAP_F_B, self.pair)
        schedule.register_custom_function(FULL_BACKWARD, self.backward)
        schedule.register_custom_function(BACKWARD_INPUT, self.backward)
        schedule.register_custom_function(BACKWARD_WEIGHT, self.weights)


def on_a_rank() -> list[str]:
    rank = dist.get_rank()
    for threads in (False, True):
        schedule, parts, whole = manual(ScheduleDualPipeV, vee(rank), 4, 6)
        by_hand = ByHand(threads)
        by_hand.take(schedule)
        check(schedule, parts, whole, (rank == 0, rank == 0))
    return by_hand.seen


def test_functions_that_run_stages_by_hand_train_exactly() -> None:
    for rank, seen in enumerate(on_processes(2, on_a_rank)):
        computes = [f"{stage}F{number}" for stage in vee(rank) for number in range(6)]
        assert sorted(each for each in seen if "F" in each) == sorted(computes * 2)  # two steps
        backwards = [each for each in seen if "B" in each or "I" in each]
        assert len(backwards) == 24
        assert len([each for each in seen if "W" in each]) == len([each for each in backwards if "I" in each]) > 0


# -- what would be overruled in silence


def one_rank(**options: Any) -> Any:
    torch.manual_seed(0)
    stages = [PipelineStage(nn.Linear(4, 4), index, 2, "cpu", **options) for index in range(2)]
    return ScheduleInterleavedZeroBubble(stages, 2, loss_fn=nn.functional.mse_loss)


def refusal(kind: Any, function: Callable[[Any, Any], None]) -> str:
    schedule = one_rank()
    schedule.register_custom_function(kind, function)
    with pytest.raises(PeerFailure, match="UsageError") as caught:
        schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))
    return str(caught.value)


def test_functions_cannot_swap_what_a_stage_gets_or_gives() -> None:
    def other_input(action: Any, ctx: Any) -> None:
        ctx.schedule_ref._stages[action.stage_index].forward_one_chunk(0, (torch.randn(2, 4),))

    def other_output(action: Any, ctx: Any) -> None:
        first, second = ctx.schedule_ref._stages
        out = first.forward_one_chunk(0, ctx.arg_mbs[0], ctx.kwarg_mbs[0])
        second.set_local_fwd_input(out * 2, 0)

    def other_loss(action: Any, ctx: Any) -> None:
        ctx.schedule_ref._stages[1].backward_one_chunk(0, loss=torch.ones(()), full_backward=False)

    def other_gradients(action: Any, ctx: Any) -> None:
        ctx.run(action)
        ctx.schedule_ref._stages[0].set_local_bwd_input((torch.ones(2, 4),), 0)

    assert "was given other arguments than the step has for that microbatch" in refusal(FORWARD, other_input)
    assert "passed on something else than what 0F0 returned" in refusal(FORWARD, other_output)
    assert "begins with the loss that its forward computed" in refusal(BACKWARD_INPUT, other_loss)
    assert "others cannot be set" in refusal(BACKWARD_INPUT, other_gradients)


def test_functions_run_only_what_their_action_is() -> None:
    def another(action: Any, ctx: Any) -> None:
        ctx.schedule_ref._stages[0].forward_one_chunk(1, ctx.arg_mbs[1], ctx.kwarg_mbs[1])

    def whole(action: Any, ctx: Any) -> None:
        ctx.schedule_ref._stages[1].backward_one_chunk(0)

    assert "a custom function for 0F0 ran 0F1, which is no part of it" in refusal(FORWARD, another)
    assert "backward_one_chunk(full_backward=True), but the order has 1I0" in refusal(BACKWARD_INPUT, whole)
    with pytest.raises(UsageError, match="only inside of a custom function"):
        one_rank()._stages[0].forward_one_chunk(0)


def test_a_function_would_leave_out_a_dw_builder_so_both_are_refused() -> None:
    schedule = one_rank(dw_builder=lambda: lambda: None)
    schedule.register_custom_function(FORWARD, lambda action, ctx: ctx.run(action))
    with pytest.raises(UsageError, match=r"stages \[0, 1\] have a dw_builder, which a custom function for B would"):
        schedule.register_custom_function(FULL_BACKWARD, lambda action, ctx: ctx.run(action))
