"""Two network namespaces as two hosts: torchrun on each, a rendezvous between them, a mesh over both.

Nothing but a virtual cable joins the two: processes of one cannot reach the loopback or abstract sockets of the other.
Made with user namespaces, so no rights are needed, and all of it is gone when the first process ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
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
        found["wire"] = pipe.deployment.world.wire(0, 1)
found["namespace"] = os.readlink("/proc/self/ns/net")
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump(found, file)
"""

HOSTS = """
set -e
unshare --net sleep 300 &
other=$!
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link add cable0 type veth peer name cable1
ip link set cable1 netns $other
ip addr add 10.77.0.1/24 dev cable0; ip link set cable0 up; ip link set lo up
nsenter --target $other --net sh -c 'ip addr add 10.77.0.2/24 dev cable1; ip link set cable1 up; ip link set lo up'
cd FOLDER
run="TORCHRUN --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29577 --rdzv-id penstock"
GLOO_SOCKET_IFNAME=cable0 $run --local-addr 10.77.0.1 --rdzv-conf is_host=1 train.py . > first.txt 2>&1 &
first=$!
status=0
GLOO_SOCKET_IFNAME=cable1 nsenter --target $other --net \\
    $run --local-addr 10.77.0.2 --rdzv-conf is_host=0 train.py . > second.txt 2>&1 || status=$?
wait $first || status=$?
kill $other
exit $status
"""


def can_make_hosts() -> bool:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    probe = "ip link add cable0 type veth peer name cable1"
    return subprocess.run(["unshare", "-rn", "sh", "-c", probe], capture_output=True).returncode == 0


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
@pytest.mark.skipif(not can_make_hosts(), reason="needs unshare, nsenter and ip, and the right to make namespaces")
def test_a_mesh_over_two_hosts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    torchrun = f"{sys.executable} -m torch.distributed.run"
    script = HOSTS.replace("TORCHRUN", torchrun).replace("FOLDER", str(tmp_path))
    process = subprocess.Popen(
        ["unshare", "-rn", "bash", "-c", script], start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        code = process.wait(270)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = "".join((tmp_path / name).read_text()[-3000:] for name in ("first.txt", "second.txt"))
    assert code == 0, said
    found: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert len({each["namespace"] for each in found}) == 2  # two hosts, two ranks on each
    assert all(each["wire"].startswith("torch.distributed (gloo)") for each in found)
    for each in found:
        assert each["ddp"] == pytest.approx(plain(), rel=1e-5)
        assert each["fsdp"] == pytest.approx(plain(), rel=1e-5)
        assert each["ddp"] == found[0]["ddp"]
