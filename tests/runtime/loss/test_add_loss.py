"""Losses from inside stages are reported, their gradient flows, and each counts once."""

from __future__ import annotations

import pytest
import torch
from runtime.loss.whole_loss import close, gradients
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.runtime.state.phase import Phase


class Balanced(nn.Module):
    def __init__(self, name: str = "balance") -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(6, 6).double(), name

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        penstock.add_loss(self.name, x.pow(2).mean() * 0.1)
        return torch.tanh(x)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe-v"])
def test_losses_from_inside_any_stage_are_reported_and_their_gradient_flows(schedule: str, recompute: str) -> None:
    torch.manual_seed(1)
    modules = [Balanced("first"), Balanced(), Balanced(), Balanced("last")]
    pipe = penstock.Pipeline(modules, microbatches=3, schedule=schedule, loss_fn=F.mse_loss, recompute=recompute)
    x, y = torch.randn(6, 6).double(), torch.randn(6, 6).double()
    result = pipe.step(x, target=y)
    found = gradients(pipe)
    pipe.zero_grad()
    sums = dict.fromkeys(("first", "balance", "last"), 0.0)
    for a, b in zip(x.split(2), y.split(2), strict=True):
        total = torch.zeros((), dtype=torch.float64)
        for module in modules:
            a = module.linear(a)
            extra = a.pow(2).mean() * 0.1
            a, total = torch.tanh(a), total + extra
            sums[module.name] += extra.item() / 3
        ((total + F.mse_loss(a, b)) / 3).backward()
    close(found, gradients(pipe))
    assert dict(result.extra_losses) == pytest.approx(sums, rel=1e-12)
    close(dict(pipe.evaluate(x, target=y).extra_losses), sums)


class ByForward(nn.Module):
    """No Sequential, so it is cut by its forward."""

    def __init__(self, between: bool = False) -> None:
        super().__init__()
        self.blocks, self.between = nn.ModuleList(Balanced() for _ in range(3)), between
        self.blocks.append(nn.Linear(6, 6).double())

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.between and number == 1 and penstock.current_microbatch() is not None:
                penstock.add_loss("between", x.pow(2).mean())
        return x


class Reads(Balanced):
    """What it does, meta tensors cannot."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.detach().sum().isfinite().item()
        return super().forward(x)


@pytest.mark.parametrize("balance", ["parameters", "time"])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("rows", [2, 5])
def test_losses_inside_a_model_that_is_cut_by_its_forward_count_once(rows: int, reads: bool, balance: str) -> None:
    """Not in the look at the example, and not where a stage asks only for the shape of what another one returns."""
    torch.manual_seed(1)
    model = ByForward()
    if reads:
        for number in range(3):
            model.blocks[number] = Reads()
    x, y = torch.randn(6, 6).double(), torch.randn(6, 6).double()
    example = (torch.randn(rows, 6).double(),)
    with penstock.Pipeline(
        model, stages=4, microbatches=3, loss_fn=F.mse_loss, example=example, balance=balance
    ) as pipe:
        result = pipe.step(x, target=y)
        found = gradients(pipe)
        pipe.zero_grad()
        expected = 0.0
        for a, b in zip(x.split(2), y.split(2), strict=True):
            with Phase("forward", 0) as phase:
                loss = F.mse_loss(model(a), b)
            assert len(phase.extra) == 3
            total = sum((value for _, value in phase.extra), torch.zeros((), dtype=torch.float64))
            ((loss + total) / 3).backward()
            expected += total.item() / 3
        close(found, gradients(pipe))
    assert result.extra_losses["balance"] == pytest.approx(expected, rel=1e-12)


def test_a_loss_between_the_units_of_a_model_is_refused_since_every_stage_would_add_it() -> None:
    x = torch.randn(6, 6).double()
    with (
        penstock.Pipeline(ByForward(True), stages=4, microbatches=3, loss_fn=F.mse_loss, example=(x,)) as pipe,
        pytest.raises(penstock.errors.PeerFailure, match=r"add_loss\('between'\) was called between the units"),
    ):
        pipe.step(x, target=x)


def test_extra_losses_of_an_evaluation_are_the_mean_over_its_own_microbatches() -> None:
    pipe = penstock.Pipeline([Balanced(), Balanced()], microbatches=4, loss_fn=F.mse_loss)
    x = torch.randn(1, 6).double()
    few = pipe.evaluate(x, target=x).extra_losses["balance"]
    many = pipe.evaluate(x.expand(8, -1), target=x.expand(8, -1)).extra_losses["balance"]
    assert few == pytest.approx(many, rel=1e-12)


def test_add_loss_outside_of_a_pipeline_is_an_error() -> None:
    with pytest.raises(penstock.errors.RunError, match=r"add_loss\('a'\) was called outside of a pipeline's forward"):
        penstock.add_loss("a", torch.tensor(1.0))
