"""What a rank holds at most, from what one microbatch does to the memory and the order of its actions."""

from __future__ import annotations

import torch

from penstock.schedule import Action, Op, Schedule
from penstock.tools.train.config.read import load_config
from penstock.tools.train.data.batch import DataBatch
from penstock.tools.train.run.activations import (
    ComputeBytes,
    MeasuredBytes,
    RunKind,
    kinds_of_runs,
    largest_microbatch,
    peaks_of,
)
from penstock.tools.train.run.allocations import StepPeaks

USUAL = {
    (Op.F, 0): ComputeBytes(30, 35),
    (Op.B, 0): ComputeBytes(-30, 8),
    (Op.F, 1): ComputeBytes(20, 21),
    (Op.B, 1): ComputeBytes(-16, 9),
    (Op.I, 1): ComputeBytes(-6, 9),
    (Op.W, 1): ComputeBytes(-14, 2),
}
FIRSTS = {  # stage 0 has gradients of 7, stage 1 of 5, of which 1 comes with I
    **USUAL,
    (Op.B, 0): ComputeBytes(-23, 10),
    (Op.B, 1): ComputeBytes(-11, 9),
    (Op.I, 1): ComputeBytes(-5, 10),
    (Op.W, 1): ComputeBytes(-10, 3),
}
PLAIN = MeasuredBytes(USUAL, {(0, 1): 4}, FIRSTS)  # stage 0 sends 4 to stage 1


def peaks(row: str, passes: int = 1) -> StepPeaks:
    actions = [Action.parse(text) for text in row.split()]
    return peaks_of(actions, {(stage, number): PLAIN for stage in (0, 1) for number in (0, 1)}, passes)


def most(row: str) -> float:
    return peaks(row).activations


def test_a_stage_holds_what_arrived_and_not_what_it_sent() -> None:
    assert most("0F0 0B0") == 26 + 4 + 8  # 30 without the 4 that were sent, the gradient of these, and what it needs
    assert most("0F0 0F1 0B0 0B1") == 26 + 26 + 4 + 8  # two microbatches are held when the first backward begins
    assert most("1F0 1B0 1F1 1B1") == 20 + 4 + 9  # one at a time: what arrived is held with it
    assert most("1F0 1F1 1B0 1B1") == 24 + 24 + 9


def test_what_an_input_backward_leaves_is_held_until_the_weights() -> None:
    left = 24 - 6 - 4  # of the forward, without the gradient that is sent back
    assert most("1F0 1I0 1F1 1I1 1W0 1W1") == left + 24 + 9


def test_gradients_are_held_from_the_first_backward_on() -> None:
    """A dry run took the sum of both peaks, though gpipe has its gradients only when its activations go."""
    assert peaks("0F0 0F1 0B0 0B1") == StepPeaks(64, 26 + 26 + 4 + 10)  # both are held while the first ones are made
    assert peaks("0F0 0B0 0F1 0B1") == StepPeaks(38, 26 + 4 + 8 + 7)  # the second microbatch finds them
    assert peaks("1F0 1I0 1W0 1F1 1I1 1W1") == StepPeaks(24 + 9, 24 + 9 + 1 + 4)


def test_passes_that_accumulate_find_the_gradients_of_the_ones_before() -> None:
    assert peaks("0F0 0F1 0B0 0B1", passes=2) == peaks("0F0 0F1 0B0 0B1", passes=3) == StepPeaks(64 + 7, 64 + 7 + 7)


def test_each_microbatch_is_run_as_the_schedule_says() -> None:
    schedule = Schedule(["0F0 0F1 0B0 0I1 0W1"])
    config = load_config(None, ["pipeline.recompute=except_last"])
    assert kinds_of_runs(config, schedule) == {(0, 0): RunKind(False, True), (0, 1): RunKind(True, False)}


def test_the_largest_microbatch_is_measured() -> None:
    """Under data.max_tokens a dry run failed; rows that microbatches do not share evenly were left out."""
    ids = torch.arange(20).view(5, 4)
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]])
    batch = DataBatch((), {"input_ids": ids, "attention_mask": mask}, ids, 20)
    by_rows = largest_microbatch(load_config(None, ["pipeline.microbatches=2"]), batch)
    assert by_rows.kwargs["input_ids"].tolist() == by_rows.target.tolist() == ids[:3].tolist()
    config = load_config(None, ["pipeline.microbatches=2", "data.max_tokens=4", "data.sequence=4"])
    by_tokens = largest_microbatch(config, batch)
    assert by_tokens.kwargs["input_ids"].tolist() == by_tokens.target.tolist() == ids[[0, 2, 3, 4], :1].tolist()
