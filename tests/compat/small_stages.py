"""Small stages, schedules of them and orders, with torch's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import penstock.compat.pipelining as ours
from penstock.compat.pipelining import schedules

BATCH = torch.randn(4, 4), torch.randn(4, 4)


def stages(count: int) -> list[ours.PipelineStage]:
    torch.manual_seed(0)
    return [ours.PipelineStage(nn.Linear(4, 4), index, count, "cpu") for index in range(count)]


def runtime(count: int = 2, microbatches: int = 2, **options: Any) -> schedules._PipelineScheduleRuntime:
    return schedules._PipelineScheduleRuntime(stages(count), microbatches, loss_fn=nn.functional.mse_loss, **options)


def orders(**rows: str) -> dict[int, list[Any]]:
    return {int(rank[1:]): [schedules._Action.from_str(cell) for cell in row.split()] for rank, row in rows.items()}
