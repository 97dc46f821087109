"""The whole model, one tensor at a time: each value once, under its first name, in the model's order."""

from __future__ import annotations

import pytest
import torch
from processes import on_processes
from torch import nn

import penstock
from penstock.errors import UsageError


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    made[3].weight = made[0].weight
    return made


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("interleaved-1f1b", 2)])
def test_each_value_comes_once_in_the_models_order_as_a_copy(schedule: str, ranks: int) -> None:
    whole = model()
    with penstock.Pipeline(whole, stages=4, microbatches=2, ranks=ranks, schedule=schedule) as pipe:
        found = dict(pipe.full_tensors())
    wanted = {name: value for name, value in model().state_dict().items() if name != "3.weight"}  # tied: once
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    found["0.weight"].zero_()
    assert not torch.equal(whole[0].weight, found["0.weight"])


def test_the_full_state_has_every_name() -> None:
    with penstock.Pipeline(model(), stages=2, microbatches=2) as pipe:
        assert list(pipe.full_state_dict()) == list(model().state_dict())


def names_on_a_v() -> list[list[str]]:
    stages = [nn.Linear(4, 4) for _ in range(4)]
    with penstock.Pipeline(stages, microbatches=4, schedule="zb-v", loss_fn=nn.functional.mse_loss) as pipe:
        return [list(pipe.full_state_dict()), [name for name, _ in pipe.full_tensors()]]


def test_the_order_is_the_models_where_a_rank_holds_the_first_stage_and_the_last() -> None:
    """It was that of the ranks, one after the other."""
    wanted = [f"{number}.{name}" for number in range(4) for name in ("weight", "bias")]
    assert on_processes(2, names_on_a_v) == [[wanted, wanted]] * 2


def test_a_rank_that_there_is_not_is_refused() -> None:
    with (
        penstock.Pipeline(model(), stages=2, microbatches=2) as pipe,
        pytest.raises(UsageError, match="ranks 0 to 1, or None"),
    ):
        pipe.full_state_dict(rank=2)
