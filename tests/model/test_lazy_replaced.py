"""An optimizer that was made before its parameters were replaced would train nothing: its step is an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.errors import UsageError
from penstock.model.lazy import mark_replaced


def test_an_optimizer_of_replaced_parameters_is_refused_when_it_steps_and_others_are_not() -> None:
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    before = torch.optim.SGD(old.parameters(), lr=0.1)
    before.step()
    mark_replaced(old.parameters())
    with pytest.raises(UsageError, match=r"this SGD was made before the Pipeline.*make it afterwards"):
        before.step()
    torch.optim.SGD(new.parameters(), lr=0.1).step()
