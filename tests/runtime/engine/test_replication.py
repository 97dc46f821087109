"""The seam to other copies of a stage: one replica asks nobody; of several, losses and counts add up."""

from __future__ import annotations

import pytest
import torch

from penstock.runtime.engine.replication import Replication
from penstock.runtime.engine.report import ReplicaReport, result_of
from penstock.schedule import build


def test_one_replica_is_complete_by_itself() -> None:
    alone, tensor, program = Replication(), torch.ones(3), build("1f1b", 2, 4)
    assert alone.lowered(program) is program
    assert alone.whole(tensor) is alone.part_of(tensor, None) is alone.first_has(tensor) is tensor
    assert alone.total(2.5)() == 2.5
    assert alone.compare("said") == alone.all_gather("call", "said") == ["said"]
    assert alone.same_count(lambda: 3) == 3
    assert alone.norm([torch.tensor([3.0, 4.0])], 2.0, None) == (5.0, torch.float32)
    assert alone.is_alone
    assert not alone.replica_reports


def test_the_loss_is_the_sum_of_the_replicas_parts_and_named_losses_are_means_over_all_microbatches() -> None:
    replicas = [
        ReplicaReport(loss=0.25, extra={"router": 4.0}, count=2),
        ReplicaReport(loss=0.5, extra={"router": 2.0, "other": 3.0}, count=1),
    ]
    found = result_of([], replicas, "output")
    assert float(found.loss) == pytest.approx(0.75)
    assert {name: float(value) for name, value in found.extra_losses.items()} == {"router": 2.0, "other": 1.0}
    assert found.output == "output"


def test_without_a_loss_there_is_none() -> None:
    assert result_of([], [ReplicaReport(count=1)], None).loss is None
