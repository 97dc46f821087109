"""How far apart two tensors may be, and what is said where they are further."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.errors import ParityError
from penstock.tools.parity_check.tensor_trace import check_close, largest


def test_differences_are_measured_by_the_largest_entry() -> None:
    want = torch.tensor([4.0, math.nan, 1.0])
    assert check_close("x", want, want.clone(), 0.0) == 0.0
    have = torch.tensor([4.0, 0.0, 1.0])
    other = torch.tensor([4.0, 0.0, 2.0])
    assert check_close("x", have, other, 0.3) == 0.25
    with pytest.raises(ParityError, match=r"x: .* differ by 0.25 of its largest entry \(allowed: 0.2\)"):
        check_close("x", have, other, 0.2)
    with pytest.raises(ParityError, match=r"torch\.float64 of shape"):
        check_close("x", have, have.double(), 1.0)
    with pytest.raises(ParityError):
        check_close("x", want, have, 0.5)  # a number against none


def test_a_gradient_of_rounding_alone_is_measured_by_the_largest_of_all() -> None:
    rounding = torch.finfo(torch.float32).eps
    want, have = torch.tensor([rounding]), torch.tensor([-rounding])
    with pytest.raises(ParityError):
        check_close("x", want, have, 64 * rounding)
    assert check_close("x", want, have, 64 * rounding, scale=largest([torch.tensor([-3.0, math.inf]), want])) < 1
