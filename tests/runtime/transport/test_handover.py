"""Handing a value to another thread without a copy."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from penstock.runtime.transport import Channel, ThreadTransport

CHANNELS = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)]


def opened(**options: Any) -> list[ThreadTransport]:
    group = ThreadTransport.group(2, **options)
    for transport in group:
        transport.open(CHANNELS)
    return group


def test_a_tensor_arrives_without_a_copy() -> None:
    first, second = opened()
    value = torch.ones(3, requires_grad=True) * 2
    first.send(0, 0, {"a": value, "b": [value]})
    came = second.receive(0, 0)
    assert came["a"].data_ptr() == came["b"][0].data_ptr() == value.data_ptr()
    assert came["a"].requires_grad
    assert came["a"].grad_fn is None


def test_a_message_under_way_does_not_keep_the_senders_graph_alive() -> None:
    freed = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
            weakref.finalize(context, freed.append, True)
            return value * 2

    first, second = opened()
    value = Double.apply(torch.ones(3, requires_grad=True))
    first.send(0, 0, value)
    assert not freed
    del value
    assert freed
    assert second.receive(0, 0).tolist() == [2, 2, 2]
