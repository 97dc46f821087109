"""A loss that is set between two steps, where the backward is split.

In a split backward, operations of parameters alone hang on an anchor of the library's own, so that their backward
runs. When another loss was set, graphs were looked at once more for leaves that no stage holds, and the anchor was
taken for one: with replicas the step was refused ("trains a tensor of shape ()"), without them there was a warning.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from bugs.small import WIDTH, batch
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

LOSSES = (F.mse_loss, nn.MSELoss(reduction="sum"), F.l1_loss)


def made() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(4)]


def plain() -> dict[str, Tensor]:
    layers, (x, y) = made(), batch()
    model = nn.ModuleList(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loss_fn in LOSSES:
        loss_fn(nn.Sequential(*layers)(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach() for name, each in model.named_parameters()}


def exchanged(family: str, replicas: int) -> dict[str, Tensor]:
    mesh = penstock.mesh(pp=2 // replicas, dp=replicas) if replicas > 1 else None
    share = slice(None) if mesh is None else slice(*((0, 4), (4, 8))[mesh.get_local_rank("dp")])
    x, y = (each[share] for each in batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with penstock.Pipeline(
            made(), microbatches=2, schedule=family, loss_fn=LOSSES[0], mesh=mesh, timeout=30
        ) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            for loss_fn in LOSSES:
                pipe.loss_fn = loss_fn
                pipe.step(x, target=y)
                optimizer.step()
                optimizer.zero_grad()
            return {name: each.detach() for name, each in pipe.named_parameters()}


@pytest.mark.parametrize(("family", "replicas"), [("zb-v", 1), ("interleaved-zb", 2)])
def test_another_loss_where_the_backward_is_split(family: str, replicas: int) -> None:
    wanted = plain()
    for found in on_processes(2, exchanged, family, replicas):
        assert found
        for name, weight in found.items():
            torch.testing.assert_close(weight, wanted[name], rtol=1e-12, atol=1e-12)
