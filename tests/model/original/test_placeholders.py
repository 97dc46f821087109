"""Tensors whose values another rank has: their memory is given back, and lies as before when they return."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.model.original.placeholders import Home, is_away, let_go, take_back


@pytest.mark.parametrize("offset", [0, 3, 16])
def test_a_tensor_that_returns_lies_as_it_did(offset: int) -> None:
    parameter = nn.Parameter(torch.randn(40)[offset : offset + 12].view(3, 4).t())
    before = parameter.stride(), parameter.data_ptr() % 64, type(parameter)
    for _ in range(2):
        let_go(parameter, Home("weight", 1, 1))
        assert is_away(parameter)
        take_back(parameter)
        assert not is_away(parameter)
        assert (parameter.stride(), parameter.data_ptr() % 64, type(parameter)) == before
        with torch.no_grad():
            parameter.copy_(torch.ones(4, 3))
