"""The order of a schedule: files of both notations, and the placement that follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining.schedules as their_schedules
from compat.small_stages import BATCH, runtime, stages
from torch import nn

import penstock.compat.pipelining as ours
from penstock.compat.pipelining import schedules
from penstock.errors import NotationError, ScheduleError, UsageError
from penstock.schedule import build, verify

OLDER = "0F0,1F0,1B0,1W0,0B0,0F1,1F1,1B1,0B1,0W0,1W1,0W1\n"  # B: for the inputs


def test_ranks_of_stages_are_those_of_the_order_or_refused() -> None:
    schedule = schedules._PipelineScheduleRuntime(
        stages(2), 2, loss_fn=nn.functional.mse_loss, stage_index_to_group_rank={0: 0, 1: 1}
    )
    rows = ["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]
    schedule.pipeline_order = {0: [schedules._Action.from_str(cell) for cell in rows]}
    with pytest.raises(UsageError, match="has stage 1 on rank 1, but the order runs it on rank 0"):
        schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))


def test_files_of_torch_load_and_run(tmp_path: Path) -> None:
    class Mock:
        def __init__(self) -> None:
            self.num_stages, self.group_size, self.group_rank = 2, 1, 0
            self.stage_index_to_group_rank: dict[int, int] = {}
            self.submod = nn.Identity()

    mocked: Any = [Mock(), Mock()]
    upstream = their_schedules.ScheduleInterleaved1F1B(mocked, 4)
    for format in ("compute_only", "compute_comms"):
        file = str(tmp_path / format)
        upstream._dump_csv(file, format=format)  # type: ignore[arg-type]
        schedule = schedules._PipelineScheduleRuntime(stages(2), 4, loss_fn=nn.functional.mse_loss)
        schedule._load_csv(file, format=format)  # type: ignore[arg-type]
        schedule.step(torch.randn(8, 4), target=torch.randn(8, 4))
    build("interleaved-1f1b", 1, 4, 2).save(tmp_path / "ours.csv")
    schedule = schedules._PipelineScheduleRuntime(stages(2), 4, loss_fn=nn.functional.mse_loss)
    schedule._load_csv(str(tmp_path / "ours.csv"))
    schedule.step(torch.randn(8, 4), target=torch.randn(8, 4))
    (tmp_path / "bad.csv").write_text("0F0,1F0,1B0,0Q0\n")
    with pytest.raises(NotationError, match="0Q0"):
        schedule._load_csv(str(tmp_path / "bad.csv"))
    with pytest.raises(UsageError, match="choose 'compute_only' or 'compute_comms'"):
        schedules._PipelineScheduleRuntime(stages(2), 4)._load_csv(file, format="rows")  # type: ignore[arg-type]


def test_an_order_that_cannot_run_is_refused_before_it_runs() -> None:
    schedule = schedules._PipelineScheduleRuntime(stages(2), 2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(UsageError, match="has no order yet"):
        schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))
    rows = ["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1"]  # 0B1 is missing
    schedule.pipeline_order = {0: [schedules._Action.from_str(cell) for cell in rows]}
    with pytest.raises(ScheduleError, match="0B1"):
        schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))


@pytest.mark.parametrize(
    "name", ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]
)
def test_the_order_that_is_shown_is_the_order_that_runs(name: str) -> None:
    """torch prints a 1F1B whose last rank never forwards microbatch 0."""
    per_rank = 1 if name in ("GPipe", "1F1B") else 2
    made = stages(4 * per_rank)
    for stage in made:
        stage.group_size = 4
    own: Any = made[:per_rank] if per_rank == 2 else made[0]
    schedule = ours.get_schedule_class(name)(own, 8)
    shown = schedule.pipeline_order
    assert sorted(shown) == [0, 1, 2, 3]
    forwards = [a.microbatch_index for a in shown[3] if a is not None and str(a.computation_type) == "F"]
    assert sorted(set(forwards)) == list(range(8))
    verify(schedule._schedule())
    assert schedules._validate_schedule(shown, 4, 4 * per_rank, 8)[1] == 1
    assert "Rank 3" in schedules._format_pipeline_order(shown)
    assert str(schedules._Action.from_str("(1F3;0B2)OVERLAP_F_B")) == "(1F3;0B2)OVERLAP_F_B"


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
