"""Schedules go between Penstock and the installed `torch.distributed.pipelining` as CSV files.

torch's schedule objects are made in this one process, with stages that are only numbers: no
process group is needed to build, dump or load an order.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from torch.distributed.pipelining import schedules as theirs

from penstock.schedule import Op, Placement, Schedule, build, lower, parse, verify
from penstock.schedule.builders import TRAINING

Form = Literal["compute_only", "compute_comms"]
FORMS: tuple[Form, Form] = ("compute_only", "compute_comms")

LOOPS = ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"]
VS = ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"]


def stages_of(placement: Placement, rank: int = 0) -> list[Any]:
    return [
        SimpleNamespace(
            stage_index=stage,
            num_stages=placement.stages,
            group=None,
            group_size=placement.ranks,
            group_rank=rank,
            is_first=stage == 0,
            is_last=stage == placement.stages - 1,
            has_backward=True,
            device="cpu",
            submod=None,
            stage_index_to_group_rank=None,
        )
        for stage in placement.stages_of(rank)
    ]


def runtime_of(placement: Placement, microbatches: int) -> Any:
    return theirs_of("_PipelineScheduleRuntime", placement, microbatches)


def theirs_of(name: str, placement: Placement, microbatches: int) -> Any:
    return getattr(theirs, name)(stages_of(placement), microbatches, loss_fn=lambda output, target: output)


CASES = [
    (name, layout(ranks, stages), microbatches)
    for names, layout, counts in ((LOOPS, Placement.loop, (2, 3)), (VS, Placement.v, (2,)))
    for name in names
    for ranks, microbatches in ((2, 4), (3, 6), (4, 8), (4, 12))
    for stages in counts
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "placement", "microbatches"), CASES, ids=str)
def test_files_that_torch_dumps_load_and_verify_here(
    tmp_path: Path, name: str, placement: Placement, microbatches: int, form: Form
) -> None:
    path = tmp_path / "torch.csv"
    made = theirs_of(name, placement, microbatches)
    made._dump_csv(str(path), format=form)
    schedule = Schedule.load(path, ranks=placement.ranks, microbatches=microbatches)
    assert schedule.placement == placement
    order = made.pipeline_order if form == "compute_only" else made.pipeline_order_with_comms
    wanted = [[None if action is None else str(action) for action in order[rank]] for rank in sorted(order)]
    assert [[None if action is None else str(action) for action in row] for row in schedule.rows] == wanted
    verify(schedule)
    if form == "compute_only":
        verify(lower(schedule, reduce=True, window=2))
    else:
        assert schedule.passes == {"transfers", "reductions", "shards"}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", TRAINING)
def test_our_files_load_in_torch(tmp_path: Path, name: str, ranks: int) -> None:
    schedule = build(name, ranks, 5)
    path = tmp_path / "ours.csv"
    for form, value in (("compute_only", schedule), ("compute_comms", lower(schedule, reduce=True, window=2))):
        value.save(path)
        loaded = runtime_of(schedule.placement, 5)
        loaded._load_csv(str(path), format=form)
        order = loaded.pipeline_order if form == "compute_only" else loaded.pipeline_order_with_comms
        assert len(order) == ranks
        for rank, row in enumerate(value.rows):
            assert list(map(str, order[rank])) == list(map(str, row))
        assert loaded.stage_index_to_group_rank == dict(enumerate(schedule.placement))


@pytest.mark.parametrize("name", TRAINING)
def test_what_torch_lowers_from_our_computes_verifies_here(tmp_path: Path, name: str) -> None:
    schedule = build(name, 3, 4)
    schedule.save(tmp_path / "ours.csv")
    loaded = runtime_of(schedule.placement, 4)
    loaded._load_csv(str(tmp_path / "ours.csv"))
    loaded._dump_csv(str(tmp_path / "torch.csv"), format="compute_comms")
    verify(Schedule.load(tmp_path / "torch.csv", ranks=3, microbatches=4))


@pytest.mark.parametrize("op", [op for op in Op if not op.is_pair])
def test_both_write_an_action_alike(op: Op) -> None:
    text = f"12{op}" if op.is_sharding else f"12{op}34"
    assert str(theirs._Action.from_str(text)) == str(parse(text)) == text


def test_both_write_an_overlapped_pair_alike() -> None:
    text = "(1F3;0B2)OVERLAP_F_B"
    assert str(theirs._Action.from_str(text)) == str(parse(text)) == text
