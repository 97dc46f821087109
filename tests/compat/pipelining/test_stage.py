"""Stages with torch's names: in one process, mocked, wrapped or wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat.small_stages import BATCH, stages
from torch import Tensor, nn

import penstock.compat.pipelining as ours
from penstock.compat.pipelining import schedules
from penstock.compat.pipelining.stage import _PipelineStageBase, build_stage
from penstock.errors import PeerFailure, UsageError


def test_all_stages_may_be_in_one_process() -> None:
    made = stages(3)
    schedule = ours.ScheduleInterleaved1F1B(made, 4, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    losses: list[Any] = []
    output = schedule.step(x, target=y, losses=losses)
    whole = nn.Sequential(*(stage.submod for stage in made))
    torch.testing.assert_close(output, whole(x).detach())
    torch.testing.assert_close(torch.stack(losses).mean(), nn.functional.mse_loss(whole(x), y).detach())
    before = [p.grad.clone() for p in whole.parameters() if p.grad is not None]
    whole.zero_grad()
    nn.functional.mse_loss(whole(x), y).backward()
    for found, wanted in zip(before, whole.parameters(), strict=True):
        torch.testing.assert_close(found, wanted.grad)
    schedule.pipeline.clip_grad_norm_(1.0)  # what torch has no name for
    schedule.close()


def test_stages_may_be_mocked_to_look_at_orders() -> None:
    class Mock(_PipelineStageBase):
        def __init__(self, **given: Any) -> None:
            self.num_stages, self.group_size, self.group_rank = given["num_stages"], given["group_size"], 0

    for local, microbatches, ranks in [(2, 3, 4), (3, 12, 4), (2, 15, 4), (4, 10, 5)]:
        made: Any = [Mock(group_size=ranks, num_stages=local * ranks) for _ in range(local)]
        for zero_bubble in (True, False):
            schedule = ours.ScheduleFlexibleInterleaved1F1B(made, microbatches, enable_zero_bubble=zero_bubble)
            schedules._validate_schedule(schedule.pipeline_order, ranks, local * ranks, microbatches)


def test_wrapped_and_wrong_stages_are_refused() -> None:
    for index in (2, -1, "0", 0.0, True):
        with pytest.raises(UsageError, match="is out of range of 2; stages have the numbers 0 to 1"):
            ours.PipelineStage(nn.Linear(2, 2), index, 2, "cpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="num_stages must be a whole number"):
        ours.PipelineStage(nn.Linear(2, 2), 0, None, "cpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is a int; pass an"):
        ours.PipelineStage(3, 0, 2, "cpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes the PipelineStages of this rank"):
        ours.ScheduleGPipe(nn.Linear(2, 2), 2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes the PipelineStages of this rank"):
        ours.ScheduleInterleaved1F1B(stages(1)[0], 2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="give each rank the same number"):
        ours.ScheduleInterleaved1F1B(stages(3)[:2], 2)


def test_build_stage_is_where_torch_has_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = ours.pipeline(model, (BATCH[0][:2],), split_spec={"1": ours.SplitPoint.BEGINNING})
    made = [build_stage(pipe.get_stage_module(index), index, pipe.info(), torch.device("cpu")) for index in range(2)]
    schedule = ours.ScheduleInterleaved1F1B(made, 2, loss_fn=nn.functional.mse_loss)
    torch.testing.assert_close(schedule.step(BATCH[0], target=BATCH[1]), model(BATCH[0]).detach())


def test_a_stage_that_returns_something_else_than_it_declared_is_named() -> None:
    """The next stage failed instead, or none did and a rank waited for one that had nothing to send."""
    x = torch.randn(8, 4)
    for change, words in (
        (torch.flatten, r"float32 of shape \(B\)"),
        (Tensor.bfloat16, r"bfloat16 of shape \(B, 4\)"),
        (lambda y: (y, y), r"float32 of shape \(B, 4\), torch.float32 of shape \(B, 4\)"),
    ):
        modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
        made = [
            ours.PipelineStage(module, index, 2, input_args=x[:2], output_args=x[:2])
            for index, module in enumerate(modules)
        ]
        schedule = ours.ScheduleInterleaved1F1B(made, 4, loss_fn=nn.functional.mse_loss)
        schedule.step(torch.randn(12, 4), target=torch.randn(12, 4))  # with any number of rows
        handle = modules[0].register_forward_hook(lambda _, __, y, change=change: change(y), prepend=True)
        with pytest.raises(PeerFailure, match=rf"stage 0 returned torch.{words}, but its output_args= declare torch.f"):
            schedule.step(x, target=x)
        handle.remove()
        schedule.close()
