"""What makes rows no schedule at all is said before anything else is looked at."""

from __future__ import annotations

from penstock.schedule import Placement, Schedule, build
from penstock.schedule.proof.shape import crowd_fault, shape_faults


def said(schedule: Schedule) -> list[str]:
    return [fault.message for fault in shape_faults(schedule)]


def test_what_builders_make_has_no_fault() -> None:
    assert said(build("zb-v", 3, 4)) == []


def test_every_rank_has_a_row_and_every_row_an_action() -> None:
    placement = Placement.loop(2)
    assert "1 rows for a placement on 2 ranks; give each rank one row" in said(
        Schedule(["0F0 0B0"], placement=placement, microbatches=1)
    )
    empty = Schedule([["0F0", "0B0"], []], placement=placement, microbatches=1)
    assert "the row has no action; every rank runs something" in said(empty)


def test_stages_and_microbatches_are_those_that_there_are() -> None:
    odd = Schedule([["0F0", "2B0"], ["1F5", "0I0"]], placement=Placement.loop(2), microbatches=2)
    assert said(odd) == [
        "there is no stage 2: stages are 0 to 1",
        "microbatch 5 is out of range: there are 2, 0 to 1",
        "stage 0 lives on rank 0",
    ]


def test_a_stage_that_nobody_runs_is_named() -> None:
    lost = Schedule([["0F0"], ["1F0"]], placement=Placement([0, 1, 1]), microbatches=1)
    assert said(lost) == ["stage 2 appears in no row; is the row of its rank missing?"]


def test_far_more_microbatches_than_rows_can_run_are_one_fault() -> None:
    few = build("1f1b", 2, 2)
    assert crowd_fault(few.replace(microbatches=3)) is None  # these are listed one by one
    fault = crowd_fault(few.replace(microbatches=10**12))
    assert fault is not None
    assert "are 2000000000000 forwards, but the rows have only" in fault.message
