"""A model in parts: what its stages hold and weigh, and that a fallback is said."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
from torch import nn

from penstock.errors import FallbackWarning
from penstock.model.by_position import split_by_position
from penstock.model.staged_model import Holding

STAGED = split_by_position([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)], None, None)


def test_what_stages_hold_is_in_their_order_and_then_comes_the_loss() -> None:
    assert [holding.stage for holding in STAGED.holdings()] == [0, 1, 2]
    loss = Holding(2, nn.Bilinear(1, 1, 1), {})
    assert replace(STAGED, loss=loss).holdings()[-1] is loss


def test_the_weights_of_a_stage_are_those_between_its_cuts() -> None:
    weighed = replace(STAGED, weights=(1, 2, 3, 4, 5), cuts=(1, 4))
    assert [weighed.weights_of(stage) for stage in range(3)] == [(1,), (2, 3, 4), (5,)]
    assert replace(STAGED, weights=()).weights_of(0) == ()


def test_only_a_fallback_is_warned_of_with_its_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        STAGED.warn()
    with pytest.warns(FallbackWarning, match=r"torch\.export graph.*\(it draws\)"):
        replace(STAGED, fallback="it draws").warn()
