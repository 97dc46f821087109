"""Copies in the places of a module's tensors, and its own tensors again."""

from __future__ import annotations

import torch
from torch import nn

from penstock.model.moved import moved


def test_a_module_has_copies_for_a_while_and_then_its_own_tensors() -> None:
    module = nn.ModuleDict({"rnn": nn.LSTM(4, 4), "norm": nn.BatchNorm1d(4), "tied": nn.Linear(4, 4, bias=False)})
    module["again"] = module["tied"]
    module["norm"].weight.requires_grad_(False)
    own = {name: id(value) for name, value in module.state_dict(keep_vars=True).items()}
    with moved(module, lambda tensor: torch.zeros_like(tensor, device="meta")) as trained:
        assert all(value.device.type == "meta" for value in module.state_dict(keep_vars=True).values())
        assert all(value.device.type == "meta" for value in module["rnn"]._flat_weights), "a list of the layer's own"
        assert module["again"].weight is module["tied"].weight
        assert len(trained) == len([value for value in module.parameters() if value.requires_grad]) == 6
    assert {name: id(value) for name, value in module.state_dict(keep_vars=True).items()} == own
    assert all(value.device.type == "cpu" for value in module["rnn"]._flat_weights)
