"""The loss of a batch is the loss of the whole batch, and `.grad` is its gradient, however the batch was cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime.loss.whole_loss import close, gradients, stages, whole
from tiers import mostly_slow
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PeerFailure
from penstock.schedule import Schedule


def test_loss_kwargs_are_split_like_the_batch() -> None:
    def weighted(output: Tensor, target: Tensor, weight: Tensor, power: float) -> Tensor:
        return ((output - target).abs().pow(power) * weight.unsqueeze(-1)).mean()

    pipe = penstock.Pipeline(stages(), microbatches=3, loss_fn=weighted)
    x, y, weight = torch.randn(7, 6).double(), torch.randn(7, 6).double(), torch.rand(7).double()
    result = pipe.step(x, target=y, loss_kwargs={"weight": weight, "power": 2.0})
    found = gradients(pipe)
    close((result.loss, found), whole(pipe, lambda model: weighted(model(x), y, weight, 2.0)))


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_several_steps_just_add_and_no_gradient_is_ever_scaled(schedule: str) -> None:
    """The gradient that was there before a step is still there, to the bit, beside what the step adds."""
    pipe = penstock.Pipeline(stages(), microbatches=4, schedule=schedule, loss_fn=F.mse_loss)
    x, y = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    big = 2.0**60  # what a step adds is lost against it, so it stays as it is, unless something scales it
    for parameter in pipe.parameters():
        parameter.grad = torch.full_like(parameter, big)
    pipe.step(x, target=y)
    assert all(bool((gradient == big).all()) for gradient in gradients(pipe))
    pipe.zero_grad()
    pipe.step(x, target=y)
    once = gradients(pipe)
    pipe.step(x, target=y)
    close(gradients(pipe), [gradient * 2 for gradient in once])


def test_losses_are_by_number_whatever_the_order_of_the_schedule() -> None:
    x, y = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    order = Schedule.from_text("0F2 0F0 0F3 0F1 0B2 0B0 0B3 0B1")
    pipe = penstock.Pipeline(stages(1), schedule=order, loss_fn=F.mse_loss)
    result = pipe.step(x, target=y)
    model = next(iter(pipe.deployment.ranks.modules().values()))
    wanted = [F.mse_loss(model(a), b).detach() for a, b in zip(x.split(2), y.split(2), strict=True)]
    close(list(result.losses), wanted)


def test_without_loss_fn_the_last_stage_gives_the_loss_in_training_and_in_evaluation() -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.mse_loss(x, labels)

    pipe = penstock.Pipeline([*stages(), Loss()], microbatches=3)
    x, y = torch.randn(7, 6).double(), torch.randn(7, 6).double()
    result = pipe.step(x, labels=y)
    body = nn.Sequential(*list(pipe.deployment.ranks.modules().values())[:-1])
    close(result.loss, F.mse_loss(body(x), y).detach())
    close(pipe.evaluate(x, labels=y).loss, F.mse_loss(body(x), y).detach())


class Tuple(nn.Module):
    """As nanoGPT: scores and, with targets, a loss."""

    def __init__(self, more: bool = False) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7)
        self.more = more

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, ...]:
        scores = self.head(self.body(self.embed(ids)).tanh())
        if targets is None:
            return scores, None
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return (scores, loss, scores.mean()) if self.more else (scores, loss)


@pytest.mark.parametrize("cut", mostly_slow(["replay", "graph"], "replay"))
def test_the_only_scalar_of_a_tuple_is_the_loss(cut: str) -> None:
    """It failed in the first step, though the example had shown it."""
    torch.manual_seed(0)
    net, ids = Tuple().double(), torch.randint(7, (5, 4))
    targets = ids.roll(-1, 1).masked_fill(torch.rand(5, 4) < 0.4, -1)
    value = net(ids, targets)[1]
    value.backward()
    wanted = [parameter.grad.clone() for parameter in net.parameters()]
    options = penstock.CutOptions(method=cut)
    example = {"ids": ids, "targets": targets}
    with penstock.Pipeline(net, stages=2, microbatches=3, example=example, cut_options=options) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            close(pipe.step(ids=ids, targets=targets).loss, value.detach())
            close(dict(zip("abcde", gradients(pipe), strict=True)), dict(zip("abcde", wanted, strict=True)))
            close(pipe.evaluate(ids=ids, targets=targets).loss, value.detach())


def test_a_tuple_without_a_loss_or_with_several_scalars_is_an_error_that_says_what_to_pass() -> None:
    ids = torch.randint(7, (4, 4))
    pipe = penstock.Pipeline(Tuple(), stages=2, microbatches=2, example=(ids,))
    with pipe, pytest.raises(PeerFailure, match="its loss is None: pass what it computes it from"):
        pipe.step(ids)
    pipe = penstock.Pipeline(Tuple(more=True), stages=2, microbatches=2, example=(ids, ids))
    with pipe, pytest.raises(PeerFailure, match="a tuple with 2 scalars, which is no loss; pass loss_fn="):
        pipe.step(ids, ids)


@pytest.mark.parametrize("wrong", [lambda out, y: (out - y).pow(2), lambda out, y: 3.0])
def test_a_loss_that_is_no_scalar_is_an_error_that_says_what_it_is(wrong: Any) -> None:
    pipe = penstock.Pipeline(stages(), microbatches=2, loss_fn=wrong)
    x = torch.randn(4, 6).double()
    with pytest.raises(PeerFailure, match=r"must return a scalar tensor"):
        pipe.step(x, target=x)
    with pytest.raises(PeerFailure, match=r"must return a scalar tensor"):
        pipe.evaluate(x, target=x)
