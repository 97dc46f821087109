"""A loss that a step gives back: a number to look at, in every way in which people look at numbers."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from penstock.errors import UsageError
from penstock.runtime.engine.report import loss_values

LOSS = loss_values([torch.tensor(1.25)])[0]


def test_it_prints_and_formats_as_a_tensor_does() -> None:
    plain = torch.tensor(1.25)
    assert f"{LOSS:.3f} {LOSS:8.2e} {LOSS}" == f"{plain:.3f} {plain:8.2e} {plain}"
    assert (repr(LOSS), str(LOSS), f"{LOSS!s:>20}") == (repr(plain), str(plain), f"{plain!s:>20}")


def test_it_is_a_number() -> None:
    assert (float(LOSS), LOSS.item(), int(LOSS), bool(LOSS), math.exp(LOSS)) == (1.25, 1.25, 1, True, math.exp(1.25))
    assert LOSS < 2
    assert max(LOSS, loss_values([torch.tensor(2.0)])[0]) == 2.0


def test_what_is_made_of_it_is_a_plain_tensor() -> None:
    made = [LOSS * 2, LOSS.detach().clone(), torch.stack([LOSS, LOSS]), sum([LOSS, LOSS]), LOSS.double()]
    made += [copy.deepcopy(LOSS), pickle.loads(pickle.dumps(LOSS))]
    assert {type(value) for value in made} == {torch.Tensor}


def test_its_backward_says_that_the_step_has_done_that() -> None:
    with pytest.raises(UsageError, match=r"step\(\) has computed all gradients already"):
        LOSS.backward()
