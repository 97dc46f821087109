"""What ranks compare before the first step: each difference that would change numbers or hang shows by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import on_processes
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.errors import UsageError


def facts(change: Any = None, **options: Any) -> dict[str, tuple[str, str]]:
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    if change is not None:
        change(stages[1])
    return penstock.Pipeline(stages, microbatches=2, loss_fn=F.mse_loss, **options).deployment.facts()


@pytest.mark.parametrize(
    ("given", "name", "words"),
    [
        ({"change": lambda stage: stage.double()}, "stage 1, dtypes", "float64"),
        ({"change": lambda stage: stage.bias.requires_grad_(False)}, "stage 1, trained", "1 of 2 parameters"),
        ({"loss_options": penstock.LossOptions(reduction="mean")}, "loss reduction", "mean"),
        ({"loss_options": penstock.LossOptions(per_microbatch=True)}, "loss per microbatch", "True"),
        ({"loss_options": penstock.LossOptions(weight=len)}, "loss weight", "one"),
        ({"batch_options": penstock.BatchOptions(dims={"target": None})}, "dims of batches", "{'target': None}"),
        ({"batch_options": penstock.BatchOptions(order="size")}, "order of microbatches", "size"),
        ({"timeout": 5.0}, "timeout", "5.0"),
        ({"seed": 5}, "seed", "5"),
    ],
)
def test_a_difference_shows_as_one_fact(given: dict[str, Any], name: str, words: str) -> None:
    plain, other = facts(), facts(**given)
    assert [each for each in plain if plain[each] != other[each]] == [name]
    assert other[name][0] == words


def seeds_of_their_own() -> list[str]:
    """What each rank gets to read where one of them was given another seed, or none."""
    found = []
    for seeds in ((3, 4), (3, None)):
        try:
            facts(seed=seeds[torch.distributed.get_rank()])
        except UsageError as error:
            found.append(str(error))
    facts(seed=3)
    return found


def test_a_rank_with_another_seed_is_named_on_all_of_them() -> None:
    """The first rank's was taken in silence, and the others' masks were not those that their user had asked for."""
    for found in on_processes(2, seeds_of_their_own):
        assert [text.rpartition("\n  ")[2] for text in found] == [
            "seed: rank 1 has 4, rank 0 has 3",
            "seed: rank 1 has None, rank 0 has 3",
        ]
