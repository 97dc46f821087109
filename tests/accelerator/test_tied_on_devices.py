"""Tied weights on devices: one parameter in several places stays one, also where torch makes another one of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from accelerator.harness import NAMES, on_device, on_ranks
from tiers import by_turns, mostly_slow
from torch import nn

import penstock
from penstock.errors import UsageError


def tied(layers: int = 8) -> Any:
    """A model whose first layers and last one have one weight, with a batch and the gradients of a plain loop."""
    import torch

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)]).double()
    model[1].weight = model[-1].weight = model[0].weight
    alone, x, y = copy.deepcopy(model), torch.randn(8, 8).double(), torch.randn(8, 8).double()
    nn.functional.mse_loss(alone(x), y).backward()
    return model, x, y, {name: each.grad for name, each in alone.named_parameters()}


def trained(family: str, devices: Any) -> tuple[float, list[str]]:
    """How far gradients are from the plain loop's, and where parameters are."""
    model, x, y, wanted = tied()
    ranks = {"stages": 4, "ranks": 2} if family == "zb-v" else {"stages": 2}
    with penstock.Pipeline(
        model, microbatches=2, schedule=family, loss_fn=nn.MSELoss(), devices=devices, timeout=20, **ranks
    ) as pipe:
        pipe.step(x, target=y)
        found = {name: each for name, each in pipe.named_parameters() if each.grad is not None}
        assert {*found} <= {*wanted}
        far = [float((each.grad.cpu() - wanted[name]).abs().max()) for name, each in found.items()]  # type: ignore[union-attr]
        return max(far), sorted({str(each.device) for each in found.values()})


@pytest.mark.parametrize(
    ("name", "family", "processes"),
    by_turns(NAMES, ["1f1b", "zb-v"], [False, True], fast=[("pretend", "zb-v", False), ("pretend", "1f1b", True)]),
)
def test_tied_weights_stay_one(name: str, family: str, processes: bool) -> None:
    """Where torch makes a new parameter of each as it goes to a device, each of them had a part of the gradient."""
    outcomes = on_ranks(2, trained, family, "auto", name=name) if processes else [on_device(trained, family, "auto")]
    for outcome in outcomes:
        assert outcome.value[0] < 1e-12
        assert outcome.races == []


def places() -> list[str]:
    """Where threads are by themselves: the first and the last rank share a parameter."""
    model, *_ = tied()
    with penstock.Pipeline(model, stages=4, microbatches=2, loss_fn=nn.MSELoss()) as pipe:
        return [str(pipe.deployment.devices[rank].index) for rank in range(4)]


def test_threads_that_share_a_parameter_share_a_device() -> None:
    assert on_device(places).value == ["0", "1", "2", "0"]


def refused() -> str:
    from accelerator import pretend

    model, *_ = tied()
    with pytest.raises(UsageError) as caught:
        penstock.Pipeline(
            model, stages=2, microbatches=2, loss_fn=nn.MSELoss(), devices=[pretend.device(0), pretend.device(1)]
        )
    return str(caught.value)


@pytest.mark.parametrize("name", mostly_slow(NAMES, "cuda"))
def test_threads_on_two_devices_cannot_share_a_parameter(name: str) -> None:
    """It was an error of torch's in the first step: two devices in one product."""
    assert on_device(refused, name=name).value.startswith(
        f"7.weight is one parameter of stages 0 and 1, whose ranks are threads on {name}:0 and {name}:1; start a "
        f"process for each rank"
    )
