"""What a stage knows about its parameters is known of these very ones, and for as long as they live."""

from __future__ import annotations

import gc

import torch
from torch import nn

from penstock.runtime.backward.deferring_mode import DeferrableParameters, DeferringMode


def test_a_first_forward_shows_which_parameters_can_wait() -> None:
    parameters, layer = DeferrableParameters(), nn.Linear(4, 4)
    assert not parameters.known
    recording = DeferringMode(parameters)
    with recording:
        output = layer(torch.randn(2, 4, requires_grad=True)) + layer.bias
    recording.learn([output])
    assert parameters.known
    assert {id(each): parameters.deferrable[id(each)][1] for each in layer.parameters()} == {
        id(layer.weight): True,
        id(layer.bias): False,  # it is also added, which cannot wait
    }


def test_a_parameter_that_is_gone_is_forgotten() -> None:
    """Its id may be another object's later."""
    parameters, weight = DeferrableParameters(), nn.Parameter(torch.ones(2))
    parameters.remember(weight, True)
    del weight
    gc.collect()
    assert not parameters.known
