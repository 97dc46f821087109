"""The generators that a forward may draw from, and their states."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from penstock.model.random_states import generators_of, global_states, put_back, states_of


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.python, self.array = torch.Generator(), random.Random(3), np.random.default_rng(4)


def test_global_generators_are_put_back() -> None:
    before = global_states()
    first = random.random(), float(np.random.rand()), torch.rand(2).tolist()
    put_back(before)
    assert (random.random(), float(np.random.rand()), torch.rand(2).tolist()) == first
    put_back(before)


def test_generators_of_modules_are_found_and_a_draw_from_any_of_them_shows() -> None:
    model = nn.Sequential(Drawing())
    found = generators_of(model, everywhere=False)
    drawing = model[0]
    assert isinstance(drawing, Drawing)
    assert found == [drawing.own, drawing.python, drawing.array]
    draws = {"torch": lambda: torch.rand(1, generator=drawing.own), "python": drawing.python.random}
    for draw in (*draws.values(), drawing.array.random, np.random.rand):
        before = states_of(found, torchs=True)
        assert states_of(found, torchs=True) == before
        draw()
        assert states_of(found, torchs=True) != before


def test_without_torchs_own_only_the_others_count() -> None:
    drawing = Drawing()
    found = generators_of(drawing, everywhere=False)
    before = states_of(found, torchs=False)
    torch.rand(1, generator=drawing.own)
    assert states_of(found, torchs=False) == before
