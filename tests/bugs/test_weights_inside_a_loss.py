"""Losses whose divisor is inside of the sum: normalised weights, a quotient below the sum, a product of vectors.

A sum was taken to count each entry once, also where entries have weights of their own. So a weighted mean with weights
that were normalised beforehand was refused although its weight= was right, and what the error recommended did not help;
and of `(each * mask / mask.sum()).sum()` nothing was read, so that it went wrong when masks became uneven.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bugs.small import batch, linears
from torch import Tensor, nn

import penstock
from penstock.errors import PeerFailure

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def each_row(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean(1)


LOSSES: dict[str, Loss] = {
    "normalised": lambda o, t, weight: (each_row(o, t) * (weight / weight.sum())).sum(),
    "a mean of 1": lambda o, t, weight: (each_row(o, t) * (weight / weight.mean())).mean(),
    "inside": lambda o, t, weight: (each_row(o, t) * weight / weight.sum()).sum(),
    "a product": lambda o, t, weight: torch.dot(each_row(o, t), weight) / weight.sum(),
    "einsum": lambda o, t, weight: torch.einsum("b,b->", each_row(o, t), weight) / weight.sum(),
}
UNEVEN = torch.tensor([1, 2, 3, 4, 5, 1, 0.5]).double()


@pytest.mark.parametrize("name", LOSSES)
def test_a_weighted_mean_is_right_with_its_weight(name: str) -> None:
    loss_fn, layers, (x, y) = LOSSES[name], linears(), batch(7)
    options = penstock.LossOptions(weight=lambda weight: weight.sum())
    with penstock.Pipeline(layers, microbatches=3, loss_fn=loss_fn, loss_options=options) as pipe:
        for weight in (torch.ones(7).double(), UNEVEN):
            pipe.zero_grad()
            pipe.step(x, target=y, loss_kwargs={"weight": weight})
            found = [each.grad for each in pipe.parameters()]
            wanted = torch.autograd.grad(loss_fn(nn.Sequential(*layers)(x), y, weight), list(pipe.parameters()))
            torch.testing.assert_close(found, list(wanted), rtol=1e-12, atol=1e-12)


def test_a_mean_that_is_written_as_weights_may_be_ragged() -> None:
    layers, (x, y) = linears(), batch(7)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        each = each_row(output, target)
        return (each * torch.full_like(each, 1 / len(each))).sum()

    with penstock.Pipeline(layers, microbatches=3, loss_fn=loss_fn) as pipe:
        result = pipe.step(x, target=y)
        torch.testing.assert_close(result.loss, loss_fn(nn.Sequential(*layers)(x), y).detach())


@pytest.mark.parametrize("name", ["inside", "a product", "einsum"])
def test_it_is_refused_without_its_weight_in_the_step_in_which_it_goes_wrong(name: str) -> None:
    x, y = batch(8)
    weight = torch.ones(8).double()
    with penstock.Pipeline(linears(), microbatches=4, loss_fn=LOSSES[name]) as pipe:
        for _ in range(2):
            pipe.step(x, target=y, loss_kwargs={"weight": weight})
        weight[0] = 0
        with pytest.raises(PeerFailure, match="are means over"):
            pipe.step(x, target=y, loss_kwargs={"weight": weight})


def test_the_weight_of_a_microbatch_of_one_row_is_no_divisor() -> None:
    layers, (x, y) = linears(), batch(5)

    def loss_fn(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return (each_row(output, target) * weight).mean()

    with penstock.Pipeline(layers, microbatches=3, loss_fn=loss_fn) as pipe:
        result = pipe.step(x, target=y, loss_kwargs={"weight": UNEVEN[:5]})
        torch.testing.assert_close(result.loss, loss_fn(nn.Sequential(*layers)(x), y, UNEVEN[:5]).detach())
