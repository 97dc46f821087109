"""Actions and orders as torch has them: their text, their errors, files of both notations, and grids."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed.pipelining.schedules as theirs
from compat.small_stages import BATCH, orders, runtime, stages
from torch import Tensor, nn

import penstock.compat.pipelining as ours
from penstock.compat.pipelining import schedules
from penstock.errors import PeerFailure, PenstockError, ScheduleError


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
