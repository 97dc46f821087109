"""A run on an example leaves no trace in the user's model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model.replay.recording.undo import OutsideChanges, patched, undone


class Busy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.seen: list[Any] = [1, [2]]
        self.by_name = {"a": torch.zeros(3)}
        self.drawn = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1  # type: ignore[operator]
        self.seen[1].append(3)
        self.by_name["a"] += 1
        self.by_name["b"] = x
        self.last = x
        torch.rand(1, generator=self.drawn)
        return x + torch.rand(1)


def test_buffers_attributes_containers_and_generators_are_as_before() -> None:
    model = Busy()
    count, seen, inner, entry = model.count, model.seen, model.seen[1], model.by_name["a"]
    state = model.drawn.get_state()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="broadcast shape"), undone(model):
        model(torch.ones(1)).add_(torch.ones(7))  # also after an error
    assert torch.equal(torch.rand(1), expected)
    assert model.count is count
    assert count.tolist() == [0.0, 0.0]
    assert model.seen is seen
    assert seen == [1, [2]]
    assert seen[1] is inner
    assert list(model.by_name) == ["a"]
    assert model.by_name["a"] is entry
    assert entry.tolist() == [0.0] * 3
    assert not hasattr(model, "last")
    assert torch.equal(model.drawn.get_state(), state)


def test_forwards_are_wrapped_only_inside() -> None:
    model = nn.Linear(2, 2)
    with patched({"layer": model}, ["layer"], lambda name, forward: lambda x: name):
        assert model(torch.ones(2)) == "layer"
    assert "forward" not in vars(model)


def test_draws_of_pythons_generator_between_units_are_refused() -> None:
    changes = OutsideChanges(nn.Identity())
    random.random()
    changes.rest()  # in a unit: that runs in one place
    changes.check()
    random.random()
    with pytest.raises(ModelError, match="draws random numbers from Python's random or numpy"):
        changes.check()
