"""How arguments become stages on ranks: what does not go together is refused with the numbers."""

from __future__ import annotations

from typing import Any

import pytest
from pipeline.nets import sequential
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.errors import ModelError, ScheduleError, UsageError
from penstock.schedule import Schedule, build, lower


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(count)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": linears(7), "ranks": 4}, "7 stages cannot fill 4 ranks evenly; split into 8, or pass ranks=1"),
        ({"model": linears(2), "ranks": 3}, "2 stages cannot fill 3 ranks evenly; split into 3, or pass ranks=2"),
        ({"model": linears(2), "ranks": 0}, "ranks=0: a pipeline has at least 1"),
        (
            {"model": linears(3), "schedule": "zb-v"},
            "zb-v has 2 stages on each rank.* got 3 stages: split into 4, or take",
        ),
        (
            {"model": linears(4), "schedule": "zb-v", "ranks": 4},
            "got 4 stages for 4 ranks: split into 8, or take schedule='zb-h1'",
        ),
        (
            {"model": linears(5), "schedule": "ZBVZeroBubble", "ranks": 2},
            "zb-v has .* got 5 stages for 2 ranks: split into 4$",
        ),
        ({"model": linears(2), "schedule": "zbv2"}, "there is no schedule 'zbv2'; did you mean zb-v?"),
        ({"model": linears(3), "stages": 2}, "stages=2, but the list has 3 stage modules"),
        ({"model": sequential(), "stages": 5}, "4 layers cannot make 5 stages; pass stages= from 1 to 4"),
        ({"model": sequential(), "balance": [2, 1]}, r"balance=\[2, 1\] sums to 3, but the model has 4 layers"),
        ({"model": sequential(), "balance": [4, 0]}, r"balance=\[4, 0\]: each stage needs at least 1 layer"),
        ({"model": sequential()}, "say how many stages to cut the 4 layers into"),
        ({"model": []}, "the model is an empty list"),
        ({"model": [nn.Linear(4, 4), 3]}, "entry 1 of the list of stages is a int"),
        ({"model": linears(2), "microbatches": None}, "say how many microbatches a batch is cut into"),
        ({"model": linears(2), "microbatches": 0}, "microbatches must be a whole number of at least 1, got 0"),
        ({"model": linears(2), "timeout": 0}, "timeout=0: timeout is in seconds and above 0"),
        ({"model": linears(2), "transport": "pigeon"}, "transport='pigeon': choose one of"),
        ({"model": linears(2), "transport": "distributed"}, "needs a process group: start with torchrun"),
        ({"model": linears(2), "devices": ["cpu"]}, "1 devices for 2 ranks"),
        (
            {"model": linears(4), "cut_options": penstock.CutOptions(skips=[(3, 1)])},
            "the edge 3 -> 1 does not fit 4 stages",
        ),
    ],
)
def test_arguments_that_cannot_work(options: dict[str, Any], words: str) -> None:
    arguments = {"microbatches": 2, "loss_fn": F.mse_loss, **options}
    with pytest.raises((UsageError, ModelError), match=words):
        penstock.Pipeline(arguments.pop("model"), **arguments)


def test_a_searched_schedule_has_a_rank_for_each_stage_unless_told_otherwise() -> None:
    for options, ranks in (({}, 4), ({"ranks": 2}, 2), ({"ranks": 1}, 1)):
        with penstock.Pipeline(linears(4), schedule="auto", microbatches=3, loss_fn=F.mse_loss, **options) as pipe:
            assert (pipe.schedule.name, pipe.schedule.ranks, pipe.schedule.stages) == ("auto", ranks, 4)
    with pytest.raises(UsageError, match="4 stages cannot fill 3 ranks evenly"):
        penstock.Pipeline(linears(4), schedule="auto", microbatches=3, ranks=3, loss_fn=F.mse_loss)


@pytest.mark.parametrize(
    ("schedule", "options", "words"),
    [
        (build("1f1b", 4, 2), {}, "the schedule is for 4 stages, the model has 2"),
        (build("1f1b", 2, 3), {"microbatches": 2}, "microbatches=2, but the schedule is for 3; leave it out"),
        (build("1f1b", 2, 3), {"ranks": 3}, "ranks=3, but the schedule is for 2 ranks; leave ranks= out"),
        (Schedule.from_text("0F0 0B0\n1F0"), {}, "1B0|no B|backward"),
    ],
)
def test_schedules_that_do_not_fit_the_model(schedule: Schedule, options: dict[str, Any], words: str) -> None:
    with pytest.raises((UsageError, ScheduleError), match=words):
        penstock.Pipeline(linears(2), schedule=schedule, loss_fn=F.mse_loss, **options)


def test_a_lowered_schedule_must_know_the_models_skips() -> None:
    lowered = lower(build("1f1b", 4, 2))
    with pytest.raises(UsageError, match=r"for the skips \[\], but the model's skips are \[\(0, 3\)\]"):
        penstock.Pipeline(
            linears(4), schedule=lowered, cut_options=penstock.CutOptions(skips=[(0, 3)]), loss_fn=F.mse_loss
        )
    penstock.Pipeline(
        linears(4), schedule=build("1f1b", 4, 2), cut_options=penstock.CutOptions(skips=[(0, 3)]), loss_fn=F.mse_loss
    )
