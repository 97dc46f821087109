"""The first rows of a dataset, to cut a model by."""

from __future__ import annotations

import random

import torch

from penstock.integrations.accumulation import first_rows


def test_rows_come_in_order_and_random_numbers_stay_as_they_were() -> None:
    class Noisy(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> int:
            torch.rand(1), random.random()
            return index

    torch.manual_seed(0)
    random.seed(0)
    wanted = torch.rand(1), random.random()
    torch.manual_seed(0)
    random.seed(0)
    assert first_rows(Noisy(), 3, tuple) == (0, 1, 2)
    assert (torch.rand(1), random.random()) == wanted
