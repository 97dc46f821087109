"""What ranks compare before the first step: each difference that would change numbers or hang shows by its name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.nn import functional as F

import penstock


def facts(change: Any = None, **options: Any) -> dict[str, tuple[str, str]]:
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    if change is not None:
        change(stages[1])
    return penstock.Pipeline(stages, microbatches=2, loss_fn=F.mse_loss, **options).facts()


@pytest.mark.parametrize(
    ("given", "name", "words"),
    [
        ({"change": lambda stage: stage.double()}, "stage 1, dtypes", "float64"),
        ({"change": lambda stage: stage.bias.requires_grad_(False)}, "stage 1, trained", "1 of 2 parameters"),
        ({"loss_options": penstock.LossOptions(reduction="mean")}, "loss reduction", "mean"),
        ({"loss_options": penstock.LossOptions(per_microbatch=True)}, "loss per microbatch", "True"),
        ({"loss_options": penstock.LossOptions(weight=len)}, "loss weight", "one"),
        ({"batch_options": penstock.BatchOptions(dims={"target": None})}, "dims of batches", "{'target': None}"),
        ({"timeout": 5.0}, "timeout", "5.0"),
    ],
)
def test_a_difference_shows_as_one_fact(given: dict[str, Any], name: str, words: str) -> None:
    plain, other = facts(), facts(**given)
    assert [each for each in plain if plain[each] != other[each]] == [name]
    assert other[name][0] == words
