"""The state of a whole model, into a pipeline's stages."""

from __future__ import annotations

import torch
from torch import nn

import penstock
from penstock.integrations.optimizer_state import load_own


def test_what_is_there_is_loaded_and_what_is_not_is_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2, bias=False))
    model[2].weight = model[0].weight  # tied: saved under either name
    pipe = penstock.Pipeline(model, stages=2, microbatches=2)
    state = {"2.weight": torch.full((2, 2), 7.0), "3.weight": torch.zeros(2)}
    missing, unexpected = load_own(pipe, state)
    assert torch.equal(model[0].weight, torch.full((2, 2), 7.0))
    assert missing == ["0.bias"]
    assert unexpected == ["3.weight"]
    pipe.close()
