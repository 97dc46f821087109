"""Batch norm over the batches of replicas: as on one process that sees them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_processes
from runtime.engine.whole_batches import EXACT, batch, network, plain_run, state_of, train
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

ROWS = 11


def replicas() -> dict[str, Tensor]:
    """Two replicas, each with half of the batch and a GPipe of its own; then the gradients are averaged."""
    model, rank = network(), dist.get_rank()
    options = penstock.BatchOptions(batch_norm="exact", batch_norm_group=dist.group.WORLD)
    pipe = penstock.GPipe(model, balance=[3, 3], chunks=3, batch_options=options, checkpoint="always")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in range(2):
        x, y = (half.chunk(2)[rank] for half in batch(step, 12))
        optimizer.zero_grad()
        F.mse_loss(pipe(x), y).backward()
        for parameter in pipe.parameters():
            dist.all_reduce(parameter.grad)
            assert parameter.grad is not None
            parameter.grad /= 2
        optimizer.step()
    return state_of(pipe)


def stages() -> dict[str, dict[str, Tensor]]:
    """Both ways in a pipeline whose ranks are processes: the state of this rank."""
    found = {}
    for how, recompute in (("deferred", "never"), ("exact", "never"), ("exact", "always")):
        options: dict[str, Any] = {
            "recompute": recompute,
            "batch_options": penstock.BatchOptions(batch_norm=how),
            "loss_fn": F.mse_loss,
        }
        with penstock.Pipeline(network(), stages=2, microbatches=4, schedule="gpipe", **options) as pipe:
            train(pipe)
            found[f"{how} {recompute}"] = pipe.state_dict()
    return found


def meshed() -> dict[str, Tensor]:
    """Two replicas of a pipeline of two ranks: the mesh says over whose batches to normalise. This rank's state."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh.get_local_rank("dp")
    options: dict[str, Any] = {
        "schedule": "gpipe",
        "batch_options": EXACT,
        "loss_fn": F.mse_loss,
        "mesh": mesh,
    }
    with penstock.Pipeline(network(), stages=2, microbatches=3, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(2):
            x, y = (half.chunk(2)[replica] for half in batch(step, 12))
            optimizer.zero_grad()
            pipe.step(x, target=y)
            optimizer.step()
        return dict(pipe.state_dict())


@pytest.mark.slow
def test_a_mesh_says_which_replicas_there_are() -> None:
    wanted = plain_run(network(), rows=12)
    answers = on_processes(4, meshed)
    assert {name for found in answers for name in found} == set(network().state_dict())
    for found in answers:
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-12, msg=name)


def in_ddp() -> None:
    """A GPipe is a module like any other to torch's own data parallelism, which waits for one gradient a parameter."""
    pipe, plain, rank = penstock.GPipe(network(False)[3:], balance=2, chunks=3), network(False)[3:], dist.get_rank()
    wrapped = nn.parallel.DistributedDataParallel(pipe)
    for step in range(2):
        x, y = batch(step, 12)
        for model in (wrapped, plain):
            model.zero_grad()
        F.mse_loss(wrapped(x.chunk(2)[rank]), y.chunk(2)[rank]).backward()
        F.mse_loss(plain(x), y).backward()
        for have, want in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(have.grad, want.grad)


def both() -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    in_ddp()
    return replicas(), stages()


@pytest.mark.slow
def test_over_replicas_and_with_stages_on_processes() -> None:
    answers = on_processes(2, both)
    wanted = plain_run(network(), rows=12)
    for found, _ in answers:
        assert set(found) == set(wanted)
        for name, want in wanted.items():
            torch.testing.assert_close(found[name], want, rtol=1e-10, atol=1e-12, msg=name)
    whole = plain_run(network())
    deferred = network()
    with penstock.Pipeline(
        deferred,
        stages=2,
        microbatches=4,
        schedule="gpipe",
        batch_options=penstock.BatchOptions(batch_norm="deferred"),
        loss_fn=F.mse_loss,
    ) as pipe:
        train(pipe)
    for _, found in answers:
        for name, value in found["deferred never"].items():
            assert torch.equal(value, deferred.state_dict()[name]), name
        for how in ("exact never", "exact always"):
            for name, value in found[how].items():
                torch.testing.assert_close(value, whole[name], rtol=1e-11, atol=1e-13, msg=name)
