"""Devices whose kernels take random times, under callers that do what a pipeline may not rely on."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from accelerator.harness import on_device, on_ranks
from tiers import by_turns

ROWS = [9, 9, 5, 9]  # batches of different sizes, in uneven microbatches


def unsteady(model: Any, seed: int) -> None:
    """Let forwards and backwards of the model's layers take random times on their devices."""
    import torch
    from accelerator import pretend

    drawn = random.Random(seed)

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            wait(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            wait(gradient)
            return gradient * 1

    def wait(x: Any) -> None:
        if x.device.type == pretend.NAME and drawn.random() < 0.5:
            pretend.sleep(drawn.random() * 0.01, x.device.index)

    for layer in model:
        layer.register_forward_hook(lambda module, args, output: Slow.apply(output))


def farthest(family: str, caller: str) -> float:
    """How far gradients are from those of a plain loop on the CPU."""
    import torch
    import torch.distributed as dist
    from accelerator import pretend
    from torch import nn

    import penstock

    rank = dist.get_rank() if dist.is_initialized() else None
    mine = [0, 1] if rank is None else [rank]
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]).double()
    batches = [(torch.randn(rows, 8).double(), torch.randn(rows, 8).double()) for rows in ROWS]
    alone = copy.deepcopy(model)
    for x, y in batches:
        nn.functional.mse_loss(alone(x), y).backward()
    wanted = {name: each.grad for name, each in alone.named_parameters()}
    unsteady(model, rank or 0)
    pretend.defer(lag=0.0003)

    stages = 2 if family in ("1f1b", "zb-h1") else 4
    pipe = penstock.Pipeline(model, stages=stages, microbatches=5, schedule=family, loss_fn=nn.MSELoss(), timeout=15)
    for x, y in batches:
        if caller == "changes streams":
            for index in mine:
                stream = torch.Stream(device=pretend.device(index))
                stream.wait_stream(torch.accelerator.current_stream(pretend.device(index)))
                torch.accelerator.set_stream(stream)
        there = [each.pin_memory() for each in (x, y)]
        pipe.step(there[0], target=there[1])
        for each in there:
            each.fill_(float("nan"))  # the user's next batch
        if caller == "communicates" and rank is not None:
            own = torch.full((4,), rank + 1.0, device=pretend.device(rank))
            dist.all_reduce(own)
        if caller == "evaluates":
            pipe.evaluate(x, target=y)
    for index in mine:
        torch.accelerator.synchronize(index)
    grads = {name: each.grad for name, each in pipe.named_parameters() if each.grad is not None}
    assert grads
    far = max(float((each.cpu() - wanted[name]).abs().max()) for name, each in grads.items())
    pipe.close()
    return far


FAMILIES = ["1f1b", "zb-h1", "zb-v", "dualpipe-v"]
CALLERS = ["changes streams", "communicates", "evaluates"]


@pytest.mark.parametrize(
    ("family", "caller"), by_turns(FAMILIES, CALLERS, fast=[("1f1b", "changes streams")], one_in=3)
)
def test_processes(family: str, caller: str) -> None:
    for outcome in on_ranks(2, farthest, family, caller):
        assert outcome.value < 1e-12
        assert outcome.races == []
        assert outcome.deadlocks == []


@pytest.mark.parametrize(("family", "caller"), by_turns(FAMILIES, CALLERS, fast=[("zb-v", "evaluates")], one_in=3))
def test_threads(family: str, caller: str) -> None:
    outcome = on_device(farthest, family, caller, name="cuda")
    assert outcome.value < 1e-12
    assert outcome.races == []
