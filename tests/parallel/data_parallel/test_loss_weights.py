"""Replicas whose losses are not means over rows: each counts by what its loss is a mean over.

One group of four processes, two replicas of a pipeline of two ranks, runs all cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PenstockError

pytestmark = pytest.mark.slow
ROWS, WIDTH, CLASSES, LENGTH = 8, 6, 5, 3
Batch = tuple[Tensor, Tensor]


class Labelled(nn.Module):
    """A last stage that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x).flatten(0, 1), labels.flatten())


def stages(own: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    last = Labelled() if own else nn.Linear(WIDTH, CLASSES)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double(), last.double()]


def batch(step: int) -> Batch:
    """In the first step, the second replica begins with a microbatch that has no target that counts."""
    torch.manual_seed(step)
    x, y = torch.randn(ROWS, LENGTH, WIDTH).double(), torch.randint(CLASSES, (ROWS, LENGTH))
    y[1:3] = -100
    y[5, 1:] = -100
    if step == 0:
        y[4:6] = -100
    return x, y


def written(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


LOSSES: dict[str, Callable[..., Any] | None] = {"known": F.cross_entropy, "written": written, "own": None}
CASES = [("known", "ddp"), ("written", "ddp"), ("written", "fsdp"), ("own", "fsdp")]


def gradients(pipe: penstock.Pipeline) -> dict[str, Tensor]:
    found = {}
    for name, parameter in pipe.named_parameters():
        grad = parameter.grad
        assert grad is not None
        found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
    return found


def every_case() -> Any:
    mesh = penstock.mesh(pp=2, dp=2)
    replica = mesh.get_local_rank("dp")
    mine = slice(replica * ROWS // 2, (replica + 1) * ROWS // 2)
    found: dict[Any, Any] = {}
    for name, kind in CASES:
        with penstock.Pipeline(
            stages(name == "own"),
            microbatches=2,
            loss_fn=LOSSES[name],
            mesh=mesh,
            parallel_options=penstock.ParallelOptions(replicate=kind),
            timeout=20,
        ) as pipe:
            if name == "written":  # one replica is refused its batch before any weight is known, and all can go on
                x, y = batch(0)
                with pytest.raises(PenstockError) as refused:
                    pipe.step(x[mine], target=y[mine].double() if replica else y[mine])
                found["refused", kind] = str(refused.value)
            for step in range(2):
                x, y = batch(step)
                x, y = x[mine], y[mine]
                if name == "known":
                    y = y[:, 0]
                    x = x[:, 0]
                given = {"labels": y} if name == "own" else {"target": y}
                result = pipe.step(x, **given)
                evaluated = pipe.evaluate(x, **given)
                found[name, kind, step] = (result.loss, evaluated.loss, gradients(pipe))
                pipe.zero_grad()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return on_processes(4, every_case)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_loss_and_the_gradients_are_those_of_all_replicas_batches_in_one_piece(
    ranks: list[dict[Any, Any]], name: str, kind: str
) -> None:
    for step in range(2):
        x, y = batch(step)
        if name == "known":
            x, y = x[:, 0], y[:, 0]
        net = nn.Sequential(*stages())
        net.zero_grad()
        loss = (F.cross_entropy if name == "known" else written)(net(x), y)
        loss.backward()
        for rank in ranks:
            found, evaluated, grads = rank[name, kind, step]
            torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(evaluated, loss.detach(), rtol=1e-12, atol=1e-12)
            for key, grad in grads.items():
                wanted = net.get_parameter(key.replace("linear.", "")).grad
                torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_replica_that_fails_before_its_first_loss_is_heard_by_all(ranks: list[dict[Any, Any]], kind: str) -> None:
    assert all("replica 1" in rank["refused", kind] for rank in ranks)
