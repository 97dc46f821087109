"""Two network namespaces as two hosts: torchrun on each, a rendezvous between them, a mesh over both."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts.network import network
from torch import nn
from torch.nn import functional as F

TRAIN = """
import json, os, sys
import torch
import penstock
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
mesh = penstock.mesh(pp=2, dp=2)
found = {}
for kind in ("ddp", "fsdp"):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
    x, y = torch.randn(12, 6), torch.randn(12, 6)
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
found["namespace"] = os.readlink("/proc/self/ns/net")
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump(found, file)
"""


def plain() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
    x, y = torch.randn(12, 6), torch.randn(12, 6)
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
@pytest.mark.timeout(900)  # four processes load torch, and on a busy machine that takes its time
def test_a_mesh_over_two_hosts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-id=penstock"]
    with network(2) as hosts:
        torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].address}:29577"]
        agents = []
        for host in hosts:
            own = [f"--local-addr={host.address}", "--rdzv-conf", f"is_host={int(host.number == 0)}", "train.py", "."]
            with (tmp_path / f"host{host.number}.txt").open("wb") as log:
                agents.append(host.start([*torchrun, *own], log, cwd=tmp_path))
        codes = [agent.wait(270) for agent in agents]
    said = "".join((tmp_path / f"host{number}.txt").read_text()[-3000:] for number in range(2))
    assert codes == [0, 0], said
    found: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert len({each["namespace"] for each in found}) == 2  # two hosts, two ranks on each
    assert all(each["wire"].startswith("torch.distributed (gloo)") for each in found)
    for each in found:
        assert each["ddp"] == pytest.approx(plain(), rel=1e-5)
        assert each["fsdp"] == pytest.approx(plain(), rel=1e-5)
        assert each["ddp"] == found[0]["ddp"]
