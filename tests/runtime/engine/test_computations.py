"""Recompute: the same numbers, the same buffers, each layer run exactly twice, and less held in between."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from tiers import by_turns
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.schedule import Schedule, build
from penstock.schedule.builders import TRAINING


class Counted(nn.Module):
    def __init__(self, runs: Counter[int], number: int) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.count, self.number = runs.update, number  # not the counter itself: its state would be put back

    def forward(self, x: Tensor) -> Tensor:
        self.count([self.number])
        out: Tensor = self.drop(self.norm(self.linear(x)))
        return out


def run(schedule: str | Schedule, recompute: str) -> tuple[Counter[int], list[Tensor]]:
    torch.manual_seed(0)
    runs: Counter[int] = Counter()
    pipe = penstock.Pipeline(
        [Counted(runs, number) for number in range(4)],
        microbatches=3,
        schedule=schedule,
        loss_fn=F.mse_loss,
        recompute=recompute,
        seed=1,
    )
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    losses = [pipe.step(x, target=y).loss for _ in range(2)]
    gradients = [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]
    buffers = [buffer for _, buffer in pipe.named_buffers()]
    return runs, [loss for loss in losses if loss is not None] + gradients + buffers


@pytest.mark.parametrize("schedule", by_turns(TRAINING, fast=["1f1b", "looped-bfs", "zb-v"]))
def test_it_changes_nothing_but_how_often_layers_run(schedule: str) -> None:
    plain, wanted = run(schedule, "never")
    assert plain == dict.fromkeys(range(4), 6)
    for recompute, times in (("always", 12), ("except_last", 10)):
        runs, found = run(schedule, recompute)
        assert runs == dict.fromkeys(range(4), times)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_the_schedule_says_which_stages_run_again(name: str) -> None:
    _, wanted = run(name, "never")
    runs, found = run(build(name, 4, 3).replace(recompute=[0, 2]), "never")
    assert runs == {0: 12, 1: 6, 2: 12, 3: 6}
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_checkpoint_inside_is_recomputed_within_the_recomputation() -> None:
    runs: Counter[int] = Counter()

    class Inside(Counted):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return out

    found = []
    for recompute in ("never", "always"):
        torch.manual_seed(0)
        runs.clear()
        stages = [Inside(runs, number) for number in range(2)]
        for stage in stages:
            stage.norm = nn.Identity()  # it would count its batches twice, with or without a pipeline
        pipe = penstock.Pipeline(stages, microbatches=2, loss_fn=F.mse_loss, recompute=recompute, seed=1)
        x = torch.randn(4, 4)
        pipe.step(x, target=x)
        assert runs == dict.fromkeys(range(2), 4 if recompute == "never" else 6)
        found.append([parameter.grad for parameter in pipe.parameters() if parameter.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_evaluation_recomputes_nothing() -> None:
    runs: Counter[int] = Counter()
    pipe = penstock.Pipeline(
        [Counted(runs, 0), Counted(runs, 1)], microbatches=2, loss_fn=F.mse_loss, recompute="always"
    )
    pipe.evaluate(torch.randn(4, 4), target=torch.randn(4, 4))
    assert runs == {0: 2, 1: 2}


class Inner(nn.Module):
    """A stage that takes gradients inside its own forward, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4).double(), how

    def _energy(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).pow(2).sum()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.how == "autograd":
            (slope,) = torch.autograd.grad(self._energy(x), self.linear.weight, create_graph=True)
            return y + slope.pow(2).sum()
        if self.how == "grad":
            return y + torch.func.grad(self._energy)(x)
        if self.how == "vjp":
            _, back = torch.func.vjp(lambda x: torch.tanh(self.linear(x)), x)
            return y + back(torch.ones_like(y))[0]
        return y + torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(self.linear(row))))(x).sum(1)


@pytest.mark.parametrize(
    ("how", "recompute", "schedule"),
    by_turns(
        ["autograd", "grad", "vjp", "jacrev"],
        ["never", "except_last", "always"],
        ["1f1b", "zb-h1"],
        fast=[("autograd", "always", "zb-h1"), ("grad", "never", "1f1b"), ("vjp", "except_last", "zb-h1")],
    ),
)
def test_a_stage_may_take_gradients_in_its_forward(how: str, recompute: str, schedule: str) -> None:
    """Recomputed ones failed: the hooks that threw away what a discarded forward saves are not known to torch.func."""
    torch.manual_seed(0)
    stages = [Inner(how) for _ in range(3)]
    plain, x = nn.Sequential(*copy.deepcopy(stages)), torch.randn(8, 4).double()
    with penstock.Pipeline(stages, microbatches=4, schedule=schedule, loss_fn=F.mse_loss, recompute=recompute) as pipe:
        for _ in range(2):
            pipe.step(x, target=x)
            for piece in x.chunk(4):
                (F.mse_loss(plain(piece), piece) / 4).backward()
            wanted = [parameter.grad for parameter in plain.parameters()]
            have = [parameter.grad for parameter in pipe.parameters()]
            torch.testing.assert_close(have, wanted, rtol=1e-12, atol=1e-12)


def test_an_unknown_choice_is_an_error() -> None:
    with pytest.raises(
        penstock.errors.UsageError, match=r"recompute='sometimes': choose one of 'never', 'except_last'"
    ):
        penstock.Pipeline([nn.Linear(4, 4)], microbatches=2, recompute="sometimes")
