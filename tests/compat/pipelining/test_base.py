"""Steps of a schedule with torch's names: what they take, and what they refuse."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from compat.small_stages import BATCH, stages
from torch import Tensor, nn

import penstock.compat.pipelining as ours
from penstock.errors import UsageError


def test_microbatches_may_come_split() -> None:
    made = stages(2)
    schedule = ours.ScheduleInterleaved1F1B(made, 2, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    parts = [(part,) for part in x.split([1, 3])]
    output = schedule._step_microbatches(parts, None, list(y.split([1, 3])))
    torch.testing.assert_close(output, nn.Sequential(*(stage.submod for stage in made))(x).detach())
    with pytest.raises(ValueError, match="Expecting 2 arg_mbs but got 1"):
        schedule._step_microbatches(parts[:1], None, [y])
    with pytest.raises(TypeError, match="kwarg_mbs must be a list but got a dict"):
        schedule._step_microbatches(parts, {}, [y])


class Scaled(nn.Module):
    """Its arguments besides the first may be left out."""

    def forward(self, x: Any, shift: Any = None, scale: Any = None) -> Any:
        x = x if shift is None else x + shift
        return x if scale is None else x * scale


def test_each_microbatch_has_its_own_keywords_and_its_own_number_of_arguments() -> None:
    """Those of microbatch 0 decided for all: what others had beyond it was dropped, and what they lacked a KeyError."""
    made = [ours.PipelineStage(module, index, 2, "cpu") for index, module in enumerate((Scaled(), nn.Linear(4, 4)))]
    schedule = ours.ScheduleInterleaved1F1B(made, 3, loss_fn=nn.functional.mse_loss)
    x, y, shift = torch.randn(6, 4), torch.randn(6, 4), torch.randn(2, 4)
    parts: list[tuple[Any, ...]] = [(piece,) for piece in x.split(2)]
    parts[1] = (*parts[1], shift)
    named = [{}, {"scale": 3.0}, {"shift": 2 * shift}]
    output = schedule._step_microbatches(parts, named, list(y.split(2)))
    wanted = [Scaled()(*args, **kwargs) for args, kwargs in zip(parts, named, strict=True)]
    torch.testing.assert_close(output, made[1].submod(torch.cat(wanted)).detach())


def test_a_microbatch_that_is_no_tuple_of_arguments_is_refused() -> None:
    """Its rows would be taken for arguments."""
    schedule = ours.ScheduleInterleaved1F1B(stages(2), 2, loss_fn=nn.functional.mse_loss)
    parts: Any = list(torch.randn(4, 4).split(2))
    with pytest.raises(UsageError, match=r"arg_mbs\[0\] is a Tensor; pass a tuple of arguments"):
        schedule._step_microbatches(parts, None, parts)


def test_arguments_of_the_loss_go_whole_to_each_microbatch() -> None:
    """As with torch; they were cut by rows where they happened to have as many as the batch."""
    seen: list[int] = []

    def loss(output: Any, target: Any, *, table: Any) -> Any:
        seen.append(len(table))
        return nn.functional.mse_loss(output, target)

    schedule = ours.ScheduleInterleaved1F1B(stages(2), 2, loss_fn=loss)
    schedule.step(torch.randn(4, 4), target=torch.randn(4, 4), loss_kwargs={"table": torch.ones(4)})
    assert seen == [4, 4]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_microbatches": 2.0}, "n_microbatches must be a whole number"),
        ({"loss_fn": "mse"}, "loss_fn='mse': pass a function"),
        ({"args_chunk_spec": 5}, "args_chunk_spec=5: pass a tuple"),
        ({"args_chunk_spec": (0,)}, "0 is not a chunk spec"),
        ({"kwargs_chunk_spec": (ours.TensorChunkSpec(0),)}, "pass a dict"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_a_step(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ours.ScheduleInterleaved1F1B(stages(2), **{"n_microbatches": 2, **options})


def test_a_module_that_is_replaced_is_never_passed_over_in_silence() -> None:
    made = stages(2)
    schedule = ours.ScheduleInterleaved1F1B(made, 2, loss_fn=nn.functional.mse_loss)
    x = torch.randn(4, 4)
    schedule.step(x, target=x)
    made[1].submod = nn.Linear(4, 4)
    with pytest.raises(UsageError, match="stage 1 has another submod"):
        schedule.step(x, target=x)
    schedule.close()
    torch.testing.assert_close(schedule.step(x, target=x), made[1].submod(made[0].submod(x)).detach())


def test_a_keyword_that_no_stage_takes_is_refused() -> None:
    schedule = ours.ScheduleInterleaved1F1B(stages(2), 2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'") as found:
        schedule.step(torch.randn(4, 4), target=torch.randn(4, 4), mask=3)
    assert isinstance(found.value, UsageError)


def test_a_target_that_is_missing_is_a_usage_error_whatever_the_loss() -> None:
    """It reached the user's loss as None, and failed there in words about NoneType."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).mean()

    schedule = ours.ScheduleInterleaved1F1B(stages(2), 2, loss_fn=loss)
    with pytest.raises(UsageError, match=r"step\(\) was passed no target on rank 0, which has the last stage"):
        schedule.step(BATCH[0])
    assert schedule.eval(BATCH[0]).shape == (4, 4)
    schedule.step(BATCH[0], target=BATCH[1])


def test_steps_are_logged_at_debug_and_only_then(caplog: pytest.LogCaptureFixture) -> None:
    schedule = ours.ScheduleInterleaved1F1B(stages(2), 2, loss_fn=nn.functional.mse_loss)
    schedule.step(BATCH[0], target=BATCH[1])
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, logger="penstock"):
        schedule.step(BATCH[0], target=BATCH[1])
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == (
        "rank 0 runs interleaved-1f1b: 1 ranks, 2 stages, 2 microbatches; warm-up of 2 forwards, 4 computes in turn, "
        "cool-down of 2 backwards; 0 sends and 0 receives; 0 idle slots"
    ), lines[0]
    order = [str(each) for each in schedule.pipeline_order[0] if each is not None]
    assert lines[1:] == [f"rank 0: action {place}, {action}" for place, action in enumerate(order)]
    caplog.clear()
    schedule.step(BATCH[0], target=BATCH[1])
    assert not caplog.records
