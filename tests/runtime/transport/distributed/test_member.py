"""A rank in its group: a group whose only backend is a device's gets one of gloo for descriptions and reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_processes
from torch import nn

import penstock
from penstock.errors import PeerFailure
from penstock.runtime.transport.distributed.transport import DistributedTransport


def without_a_backend_for_the_cpu() -> Any:
    """As `init_process_group("nccl")` makes it; the device here is one that nobody has."""
    group = dist.new_group(backend="xpu:gloo")
    assert [each.type for each in group._device_types] == ["xpu"]
    return group


def exchanged() -> list[list[int]]:
    group = without_a_backend_for_the_cpu()
    found = []
    for _ in range(2):
        transport = DistributedTransport(group, 20.0)
        found.append(transport.exchange(dist.get_rank()))
        transport.close()
    return found


def test_a_group_that_has_a_devices_backend_alone_gets_one_of_gloo() -> None:
    """It ended in torch's own error: "No backend type associated with device type cpu"."""
    assert on_processes(2, exchanged) == [[[0, 1], [0, 1]]] * 2


def late() -> str | None:
    group = without_a_backend_for_the_cpu()
    if dist.get_rank() == 1:
        return None
    with pytest.raises(PeerFailure) as caught:
        DistributedTransport(group, 1.0)
    return str(caught.value)


def test_a_rank_that_makes_no_pipeline_is_named() -> None:
    text, _ = on_processes(2, late)
    assert text.startswith("rank 1 failed")
    assert "within 1 s" in text


def trained(schedule: str) -> float:
    """The largest difference of a gradient to a plain loop's, after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()
    plain = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()
    plain.load_state_dict(model.state_dict())
    x, y = torch.randn(8, 4).double(), torch.randn(8, 4).double()
    group = without_a_backend_for_the_cpu()
    pipe = penstock.Pipeline(
        model, stages=4, microbatches=4, schedule=schedule, loss_fn=nn.functional.mse_loss, group=group
    )
    for _ in range(2):
        pipe.step(x, target=y)
        nn.functional.mse_loss(plain(x), y).backward()
    wanted = dict(plain.named_parameters())
    difference = max(float((wanted[name].grad - each.grad).abs().max()) for name, each in pipe.named_parameters())
    pipe.close()
    return difference


def test_a_pipeline_trains_on_such_a_group() -> None:
    assert max(on_processes(2, trained, "zb-v")) < 1e-15
