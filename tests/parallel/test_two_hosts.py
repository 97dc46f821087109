"""Two network namespaces as two hosts, two ranks on each, and a mesh over both."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the ranks' optimizers and shards need these: loaded before the forks, and not in each
import torch.distributed.fsdp
from hosts.network import network
from hosts.ranks import ranks_on
from torch import Tensor, nn
from torch.nn import functional as F

import penstock


def made() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
    return model, torch.randn(12, 6), torch.randn(12, 6)


def train(say: Callable[[Any], None]) -> None:
    """Two steps with replicas, and with shards."""
    mesh = penstock.mesh(pp=2, dp=2)
    found: dict[str, Any] = {"namespace": os.readlink("/proc/self/ns/net")}
    for kind in ("ddp", "fsdp"):
        model, x, y = made()
        mine = slice(0, 8) if mesh.get_local_rank("dp") == 0 else slice(8, 12)
        with penstock.Pipeline(
            model,
            stages=4,
            microbatches=4,
            schedule="zb-v",
            loss_fn=F.mse_loss,
            mesh=mesh,
            parallel_options=penstock.ParallelOptions(replicate=kind),
            timeout=30,
        ) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            losses = []
            for _ in range(2):
                losses.append(pipe.step(x[mine], target=y[mine]).loss.item())
                optimizer.step()
                optimizer.zero_grad()
            found[kind] = losses
            found["wire"] = pipe.deployment.world.describe_link(0, 1)
    say(found)


def plain() -> list[float]:
    model, x, y = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.timeout(900)  # a busy machine takes its time
def test_a_mesh_over_two_hosts(tmp_path: Path) -> None:
    """Started as torchrun would; with torchrun itself there are two hosts in tests/hosts/test_elastic_run.py."""
    with network(2) as hosts, ranks_on(hosts, 2, train, tmp_path) as ranks:
        found = ranks.wait()
    assert len({each["namespace"] for each in found}) == 2  # two hosts, two ranks on each
    assert all(each["wire"].startswith("torch.distributed (gloo)") for each in found)
    for each in found:
        assert each["ddp"] == pytest.approx(plain(), rel=1e-5)
        assert each["fsdp"] == pytest.approx(plain(), rel=1e-5)
        assert each["ddp"] == found[0]["ddp"]
