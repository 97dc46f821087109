"""Actions and orders as torch has them: their text, their errors, files of both notations, and grids."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining.schedules as theirs
from torch import Tensor, nn

import penstock.compat.pipelining as ours
from penstock.compat.pipelining import schedules
from penstock.compat.pipelining.stage import build_stage
from penstock.errors import PeerFailure, PenstockError, ScheduleError, UsageError


def stages(count: int) -> list[ours.PipelineStage]:
    torch.manual_seed(0)
    return [ours.PipelineStage(nn.Linear(4, 4).double(), index, count, "cpu") for index in range(count)]


def runtime(count: int = 2, microbatches: int = 2, **options: Any) -> schedules._PipelineScheduleRuntime:
    return schedules._PipelineScheduleRuntime(stages(count), microbatches, loss_fn=nn.functional.mse_loss, **options)


def orders(**rows: str) -> dict[int, list[Any]]:
    return {int(rank[1:]): [schedules._Action.from_str(cell) for cell in row.split()] for rank, row in rows.items()}


BATCH = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)


@pytest.mark.parametrize("text", ["2F0", "2F", "1SEND_B3", "0UNSHARD", "1RECV_F", "(1F3;0B2)OVERLAP_F_B", ""])
def test_texts_are_read_as_torch_reads_them(text: str) -> None:
    their, our = theirs._Action.from_str(text), schedules._Action.from_str(text)
    assert str(our) == str(their)
    if their is not None:
        assert our is not None
        assert our[:3] == their[:3]


def test_errors_have_torchs_classes_and_texts_and_are_penstocks_too() -> None:
    for make, text in (
        (lambda part: part._ComputationType.from_str("X"), "Invalid computation type X"),
        (lambda part: part._Action.from_str("F2"), "Invalid action string: F2, should be formatted as"),
    ):
        for part in (theirs, schedules):
            with pytest.raises(RuntimeError, match=text) as caught:
                make(part)
        assert isinstance(caught.value, PenstockError)
    with pytest.raises(AssertionError, match="1B1") as wrong:
        schedules._validate_schedule(orders(r0="0F0 0F1 0B0 0B1", r1="1F0 1F1 1B0"), 2, 2, 2)
    assert isinstance(wrong.value, ScheduleError)
    with pytest.raises(AssertionError, match="no action"):
        schedules._validate_schedule({0: []}, 1, 1, 1)
    with pytest.raises(AssertionError, match="1 stages on 1 ranks, but there are 2 on 2"):
        schedules._validate_schedule(orders(r0="0F0 0B0"), 2, 2, 1)
    with pytest.raises(ValueError, match=r"Invalid computation type SEND_F\. Only FORWARD"):
        runtime().register_custom_function(schedules.SEND_F, lambda action, ctx: None)
    with pytest.raises(NotImplementedError, match="format='rows' is not implemented"):
        runtime()._prepare_schedule_with_comms(orders(r0="0F0"), format="rows")  # type: ignore[arg-type]


def test_a_grid_has_torchs_shape_and_the_ranks_own_numbers() -> None:
    """torch labels the columns from 0 on, whatever ranks they are of."""
    order = {0: ["0F0", None, "0B0"], 1: [None, "1F0", "1B0", "1F1"]}
    lines = schedules._format_pipeline_order(order, error_step_number=1).splitlines()
    assert lines == [
        "        Rank 0 Rank 1",
        "Step 0: 0F0",
        "Step 1:        1F0 <-- ERROR HERE",
        "Step 2: 0B0    1B0",
        "Step 3:        1F1",
    ]
    assert schedules._format_pipeline_order({3: ["0F0"], 5: ["1F0"]}).startswith("        Rank 3 Rank 5\n")


# -- files


def test_a_file_is_proved_when_it_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    file.write_text("0F0,1F0,1B0,0B0,0F1,1F1,1B1\n")  # 0B1 is missing
    schedule = runtime()
    with pytest.raises(AssertionError, match="0B1"):
        schedule._load_csv(str(file))
    file.write_text("0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1,0SEND_F1\n")
    with pytest.raises(ValueError, match="found communication action '0SEND_F1' at rank 0, position 8"):
        schedule._load_csv(str(file))
    file.write_text("0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1\n")
    with pytest.raises(UsageError, match="has stage 1 on rank 1, but the order runs it on rank 0"):
        runtime(stage_index_to_group_rank={0: 0, 1: 1})._load_csv(str(file))
    with pytest.raises(AssertionError, match="2 stages on 1 ranks, but there are 3 on 1"):
        runtime(3)._load_csv(str(file))
    assert schedule.pipeline_order == {}
    schedule._load_csv(str(file))
    schedule.step(BATCH[0], target=BATCH[1])


OLDER = "0F0,1F0,1B0,1W0,0B0,0F1,1F1,1B1,0B1,0W0,1W1,0W1\n"  # B: for the inputs


def test_torchs_older_notation_of_zero_bubble_is_read_where_that_is_said(tmp_path: Path) -> None:
    file = tmp_path / "older.csv"
    file.write_text(OLDER)
    for said, text in ((None, "is a full backward, yet"), (True, "use_full_backward=True, but the order has")):
        with pytest.raises(AssertionError, match=text):
            runtime(use_full_backward=said)._load_csv(str(file))
    schedule = runtime(use_full_backward=False)
    schedule._load_csv(str(file))
    assert [str(each) for each in schedule.pipeline_order[0][2:4]] == ["1I0", "1W0"]
    x, y = BATCH
    plain = nn.Sequential(*(stage.submod for stage in stages(2)))
    nn.functional.mse_loss(plain(x), y).backward()
    for _ in range(2):
        for stage in schedule._stages:
            stage.submod.zero_grad()
        schedule.step(x, target=y)
    found = [each.grad for stage in schedule._stages for each in stage.submod.parameters()]
    for gradient, wanted in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(gradient, wanted.grad)
    by_hand = runtime(use_full_backward=False)
    by_hand.pipeline_order = {0: [schedules._Action.from_str(cell) for cell in OLDER.strip().split(",")]}
    by_hand.step(x, target=y)


# -- running


def test_a_target_that_is_missing_is_a_usage_error_whatever_the_loss() -> None:
    """It reached the user's loss as None, and failed there in words about NoneType."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).mean()

    schedule = ours.ScheduleInterleaved1F1B(stages(2), 2, loss_fn=loss)
    with pytest.raises(UsageError, match=r"step\(\) was passed no target on rank 0, which has the last stage"):
        schedule.step(BATCH[0])
    assert schedule.eval(BATCH[0]).shape == (4, 4)
    schedule.step(BATCH[0], target=BATCH[1])


class Fails(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no such luck")


def test_a_failure_shows_the_schedule_and_where_in_it() -> None:
    made = stages(2)
    made[1].submod = Fails(4, 4)
    schedule = ours.ScheduleInterleaved1F1B(made, 2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(PeerFailure) as caught:
        schedule.step(BATCH[0], target=BATCH[1])
    (note,) = [each for each in caught.value.__notes__ if "Rank 0" in each]
    assert note.startswith("ScheduleInterleaved1F1B failed at step 1 of rank 0, action 1F0:\n")
    assert "\nStep 1: [1F0] <-- ERROR HERE\n" in note
    assert note.count("ERROR HERE") == 1


def test_a_loss_that_is_not_there_yet_says_which_are() -> None:
    said: list[str] = []

    def backward(action: Any, ctx: Any) -> None:
        stage = ctx.schedule_ref._stages[action.stage_index]
        if stage.is_last and action.microbatch_index == 0 and not said:
            try:
                ctx.schedule_ref._maybe_get_loss(stage, 7)
            except RuntimeError as error:
                said.append(str(error))
        assert ctx.schedule_ref._maybe_get_loss(ctx.schedule_ref._stages[0], 7) is None
        ctx.run(action)

    schedule = ours.ScheduleInterleaved1F1B(stages(2), 2, loss_fn=nn.functional.mse_loss)
    schedule.register_custom_function(schedules.FULL_BACKWARD, backward)
    schedule.step(BATCH[0], target=BATCH[1])
    assert said[0].startswith("Loss for microbatch 7 is not available. Available losses for microbatches: [0")


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


def test_build_stage_is_where_torch_has_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    pipe = ours.pipeline(model, (BATCH[0][:2],), split_spec={"1": ours.SplitPoint.BEGINNING})
    made = [build_stage(pipe.get_stage_module(index), index, pipe.info(), torch.device("cpu")) for index in range(2)]
    schedule = ours.ScheduleInterleaved1F1B(made, 2, loss_fn=nn.functional.mse_loss)
    torch.testing.assert_close(schedule.step(BATCH[0], target=BATCH[1]), model(BATCH[0]).detach())
