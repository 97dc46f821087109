"""Recompute: the same numbers, the same buffers, each layer run exactly twice, and less held in between."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import PeerFailure
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


@pytest.mark.parametrize("schedule", TRAINING)
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


def test_a_stage_that_differentiates_in_its_forward_is_told_what_to_do() -> None:
    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out = torch.tanh(self.linear(x))
            (slope,) = torch.autograd.grad(out.sum(), self.linear.weight, create_graph=True)
            return out + slope.pow(2).sum()

    x = torch.randn(4, 4)
    pipe = penstock.Pipeline([Penalty(), nn.Linear(4, 4)], microbatches=2, loss_fn=F.mse_loss, recompute="always")
    with pytest.raises(PeerFailure, match="use recompute='never' for it"):
        pipe.step(x, target=x)


def test_an_unknown_choice_is_an_error() -> None:
    with pytest.raises(
        penstock.errors.UsageError, match=r"recompute='sometimes': choose one of 'never', 'except_last'"
    ):
        penstock.Pipeline([nn.Linear(4, 4)], microbatches=2, recompute="sometimes")
