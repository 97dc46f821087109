"""A replica that is lost, stalls or takes its time while the devices of others wait for it in a collective."""

from __future__ import annotations

from typing import Any

import pytest
from accelerator.harness import attempt
from tiers import mostly_slow

WHO = 3  # the second stage of the second replica: rank 1 reduces its gradients with it
SOON = 40.0  # seconds, on a machine with much to do; the timeout is beyond, but where a replica stalls


def lost_in_a_step(kind: str, how: str) -> dict[str, Any]:
    """Fail on one of four processes in the last backward of the second step; the others read a gradient afterwards."""
    import os
    import signal
    import time
    from contextlib import suppress

    import torch
    import torch.distributed as dist
    from accelerator import pretend
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    import penstock
    from penstock.errors import PeerFailure
    from penstock.schedule import Op

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    mesh = init_device_mesh(pretend.NAME, (2, 2), mesh_dim_names=("dp", "pp"))
    pretend.defer(lag=0.001)
    pipe = penstock.Pipeline(
        model,
        stages=2,
        microbatches=4,
        schedule="1f1b",
        loss_fn=nn.MSELoss(),
        mesh=mesh,
        parallel_options=penstock.ParallelOptions(replicate=kind),
        timeout=4 if how == "stalls" else 60,
    )
    number = 0

    def handler(action: Any, context: Any) -> None:
        if number == 1 and dist.get_rank() == WHO and action.microbatch == 3:
            if how == "raises":
                raise ValueError("on purpose")
            time.sleep({"dies": 1.0, "stalls": 15.0, "compiles": PATIENCE + 3}[how])  # the others' kernels wait by now
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
        context.run(action)

    pipe.register(Op.B, handler)
    found: dict[str, Any] = {"errors": []}
    begun = 0.0
    for number in range(2):  # noqa: B007 the handler reads it
        begun, error = time.monotonic(), ""
        try:
            pipe.step(x, target=y)
        except PeerFailure as failure:
            error = str(failure).partition("\n")[0]
        found["errors"].append(error)
    found["seconds"] = time.monotonic() - begun
    with suppress(RuntimeError):  # a kernel that was aborted
        torch.accelerator.synchronize(dist.get_rank())
    found["released"] = time.monotonic() - begun
    pipe.close()
    found["closed"] = time.monotonic() - begun
    return found


PATIENCE = 6.0  # seconds that the user's group allows an operation, after which its watchdog ends the process
WAYS = [(kind, how) for kind in ("ddp", "fsdp") for how in ("dies", "raises", "stalls")]


@pytest.mark.parametrize(("kind", "how"), mostly_slow(WAYS, ("ddp", "dies")))
def test_devices_that_wait_for_a_lost_replica_are_released(kind: str, how: str) -> None:
    """All were told in time, and then waited for ever for kernels of the collective, which nobody had ended."""
    outcomes = attempt(4, lost_in_a_step, kind, how, grouped=True, limit=90)
    for rank, each in enumerate(outcomes):
        if how == "dies" and rank == WHO:
            assert each.code == -9
            continue
        assert not each.error, each.error + each.stderr[-2000:]
        assert each.value["errors"][0] == ""
        assert "rank 1 of replica 1 failed" in each.value["errors"][1]
        assert each.value["closed"] < SOON


@pytest.mark.parametrize("kind", mostly_slow(["ddp", "fsdp"], "fsdp"))
def test_a_replica_may_take_longer_than_the_watchdog_of_its_peers_allows(kind: str) -> None:
    """As one that compiles does: the limit was the pipeline's timeout and a little, after which the peer was killed."""
    for each in attempt(4, lost_in_a_step, kind, "compiles", grouped=True, limit=90, timeout=PATIENCE):
        assert not each.error, each.error + each.stderr[-2000:]
        assert each.value["errors"] == ["", ""]
