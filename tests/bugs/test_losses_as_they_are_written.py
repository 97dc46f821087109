"""Losses as people write them: right ones were refused, wrong ones trained in silence, and sums were taken for means.

What a loss is divided by was read off its graph only where the graph went from the loss down to a sum or a mean. A
divisor above anything else (a trace, a norm, an entry) was not compared at all, so that a masked mean went wrong when
its masks became uneven. A loss that is a sum at one time and a mean at another has the same nodes, and was trusted as
the one that it had been. And a mean over rows below a sum, or a parameter that weighs a term, was taken for a
difference between microbatches, so that right losses were refused; as were a loop over rows, each divided by what is
its own, and in double precision any loss with a small number beside its divisor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bugs.small import WIDTH, batch, linears
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PeerFailure

Loss = Callable[..., Tensor]
SCALES = torch.linspace(0.5, 2, WIDTH).double()


def each(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square()


def trained(loss_fn: Loss, rows: int, steps: int = 3, more: Callable[[int], dict[str, Tensor]] = lambda _: {}) -> None:
    """Train, and compare each step with the batch in one piece; an error of a step is raised."""
    layers = linears(2)
    plain = nn.Sequential(*layers)
    with penstock.Pipeline(layers, microbatches=4, loss_fn=loss_fn) as pipe:
        parameters = list(pipe.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for step in range(steps):
            (x, y), given = batch(rows), more(step)
            wanted = loss_fn(plain(x), y, **given)
            gradients = torch.autograd.grad(wanted, parameters)
            found = pipe.step(x, target=y, loss_kwargs=given)
            torch.testing.assert_close(found.loss, wanted.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close([p.grad for p in parameters], list(gradients), rtol=1e-12, atol=1e-12)
            optimizer.step()
            optimizer.zero_grad()


class Learned(nn.Module):
    """The weight of a term is a parameter, and not a function of one."""

    def __init__(self, of_entries: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(SCALES.clone() if of_entries else SCALES[0].clone())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self.weight.dim():
            return (each(output, target).mean(0) * self.weight).sum()
        return self.weight * F.mse_loss(output, target) + 0.1 * self.weight.square()


RIGHT: dict[str, Loss] = {
    "a sum of means over rows": lambda o, t: each(o, t).mean(0).sum(),
    "a mean of means over rows": lambda o, t: each(o, t).mean(0).mean(),
    "a weighted sum of means": lambda o, t: (each(o, t).mean(0) * SCALES).sum(),
    "stacked terms": lambda o, t: torch.stack([each(o, t).mean(), 0.1 * o.abs().mean()]).sum(),
    "the mean of stacked terms": lambda o, t: torch.stack([each(o, t).mean(), o.abs().mean()]).mean(),
    "means of each row": lambda o, t: each(o, t).mean(1).mean(),
    "a loop over rows": lambda o, t: (
        sum(each(a, b).sum() / (1 + b.abs().sum()) for a, b in zip(o, t, strict=True)) / len(o)
    ),
    "a loop over many entries": lambda o, t: torch.stack([(2 + a).abs() for a in each(o, t).flatten()]).mean(),
    "a divisor that is never 0": lambda o, t: each(o, t).sum() / (t.numel() + 1e-12),
    "two loops over rows": lambda o, t: (
        torch.stack([row.mean() for row in each(o, t)]).mean() + 0.5 * sum(row.abs().max() for row in o) / len(o)
    ),
    "columns of which one never counts": lambda o, t: (
        (each(o, t) * (SCALES > 1)).sum(0) / (torch.ones_like(t) * (SCALES > 1)).sum(0).clamp(min=1)
    ).mean(),
    "no more than": lambda o, t: each(o, t).mean().clamp(max=1e3),
    "a learned weight": Learned(of_entries=False),
    "learned weights": Learned(of_entries=True),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("rows", [4, 8, 11])
def test_a_right_loss_is_not_refused_where_microbatches_are_ragged(name: str, rows: int) -> None:
    trained(RIGHT[name], rows)


def errors(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return (output - target) * mask


UNEVEN: dict[str, Loss] = {
    "a trace": lambda o, t, mask: torch.trace(errors(o, t, mask).T @ errors(o, t, mask)) / mask.sum(),
    "a norm": lambda o, t, mask: torch.linalg.vector_norm(errors(o, t, mask)) ** 2 / mask.sum(),
    "a distance": lambda o, t, mask: torch.dist(o[mask], t[mask]) ** 2 / mask.sum(),
    "an entry": lambda o, t, mask: errors(o, t, mask).square().sum(1).cumsum(0)[-1] / mask.sum(),
    "sums of rows": lambda o, t, mask: (errors(o, t, mask).square() / mask.sum()).sum(1).sum(),
    "of columns": lambda o, t, mask: (errors(o, t, mask).square().sum(0) / mask.sum(0).clamp(min=1)).mean(),
    "in logarithms": lambda o, t, mask: torch.exp(errors(o, t, mask).square().sum().log() - mask.sum().double().log()),
    "between two": lambda o, t, mask: torch.lerp(o.new_zeros(()), errors(o, t, mask).square().sum(), 1 / mask.sum()),
    "at once": lambda o, t, mask: torch.addcdiv(
        o.new_zeros(()), errors(o, t, mask).square().sum(), mask.sum().double()
    ),
    "a loop over rows": lambda o, t, mask: sum(row.square().sum() for row in errors(o, t, mask)) / mask.sum(),
    "masked or not": lambda o, t, mask: each(o, t).mean() if mask.all() else each(o, t)[mask].mean(),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_a_masked_mean_of_any_form_is_refused_in_the_step_in_which_masks_become_uneven(name: str) -> None:
    """The first two steps have masks of both kinds, and are right."""

    def masks(step: int) -> dict[str, Tensor]:
        mask = torch.ones(8, WIDTH).bool()
        mask[:, 2:] = step != 1
        mask[0, 1] = step != 2
        return {"mask": mask}

    with pytest.raises(PeerFailure, match="microbatches 0 and 1"):
        trained(UNEVEN[name], 8, more=masks)
    trained(UNEVEN[name], 8, steps=2, more=masks)


class Reduced(nn.Module):
    """A loss of the user's own, with torch's name for how it reduces."""

    def __init__(self, loss_fn: Loss, reduction: str) -> None:
        super().__init__()
        self.loss_fn, self.reduction = loss_fn, reduction

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.loss_fn(output, target, reduction=self.reduction)


def labels(output: Tensor, target: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(output, target.argmax(1), reduction=reduction)


@pytest.mark.parametrize("loss_fn", [nn.MSELoss, nn.L1Loss, nn.HuberLoss, F.mse_loss, labels])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_reduces_otherwise_from_a_later_step_on_is_followed_or_refused(
    loss_fn: Any, reduction: str
) -> None:
    """All that torch's own losses are told by their attributes may change; of another loss it is a new form."""
    is_torchs = isinstance(loss_fn, type)
    loss = loss_fn(reduction=reduction) if is_torchs else Reduced(loss_fn, reduction)
    options = penstock.LossOptions(reduction=None if is_torchs else reduction)
    layers, (x, y) = linears(2), batch(8)
    with penstock.Pipeline(layers, microbatches=4, loss_fn=loss, loss_options=options) as pipe:
        parameters = list(pipe.parameters())
        for step in range(4):
            loss.reduction = reduction if step < 2 else {"mean": "sum", "sum": "mean"}[reduction]
            wanted = loss(nn.Sequential(*layers)(x), y)
            pipe.zero_grad()
            if step == 2 and not is_torchs:
                with pytest.raises(PeerFailure, match="taken together is"):
                    pipe.step(x, target=y)
                return
            assert pipe.step(x, target=y).loss == pytest.approx(wanted.item(), rel=1e-12)
            gradients = torch.autograd.grad(wanted, parameters)
            torch.testing.assert_close([p.grad for p in parameters], list(gradients), rtol=1e-12, atol=1e-12)


class Owns(nn.Module):
    """A model that computes its loss."""

    def __init__(self, loss_fn: Loss) -> None:
        super().__init__()
        self.first, self.last, self.loss_fn = *linears(2), loss_fn

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output: Tensor = self.last(torch.tanh(self.first(x)))
        return self.loss_fn(output, y)


def connectionist(output: Tensor, target: Tensor) -> Tensor:
    """As in a transformers model of speech, which adds up by default."""
    scores = output.log_softmax(1).expand(3, *output.shape)
    lengths = torch.full((len(output),), 3)
    return F.ctc_loss(scores, 1 + target[:, :1].gt(0).long(), lengths, lengths // 3, reduction="sum")


SUMS: dict[str, Loss] = {
    "a sum": lambda o, t: each(o, t).sum(),
    "torch's own": lambda o, t: F.mse_loss(o, t, reduction="sum"),
    "sums of rows": lambda o, t: 0.7 * each(o, t).mean(1).sum(),
    "with another term": lambda o, t: each(o, t).sum() + o.abs().mean(),
    "connectionist": connectionist,
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_that_the_model_computes_is_refused_until_somebody_says_what_it_is(name: str) -> None:
    """It was taken for a mean over rows: the loss and its gradients were those of the batch over the microbatches."""
    model, (x, y) = Owns(SUMS[name]), batch(8)
    more: dict[str, Any] = {"stages": 2, "microbatches": 4, "example": {"x": x, "y": y}}
    with (
        penstock.Pipeline(model, **more) as pipe,
        pytest.raises(PeerFailure, match=r"a sum over the 2 rows of microbatch 0.*reduction='sum'"),
    ):
        pipe.step(x=x, y=y)
    if name == "with another term":
        return
    with penstock.Pipeline(model, **more, loss_options=penstock.LossOptions(reduction="sum")) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            wanted = model(x, y)
            gradients = torch.autograd.grad(wanted, list(model.parameters()))
            assert pipe.step(x=x, y=y).loss == pytest.approx(wanted.item(), rel=1e-12)
            found = [parameter.grad for parameter in model.parameters()]
            torch.testing.assert_close(found, list(gradients), rtol=1e-12, atol=1e-12)


def test_a_model_that_compares_rows_by_a_cross_entropy_warns() -> None:
    """A mean over rows to all appearance, of a target that is no part of the batch: as in CLIP."""
    x, y = batch(8)
    model = Owns(lambda o, t: F.cross_entropy(o @ t.T, torch.arange(len(o))))
    with (
        penstock.Pipeline(model, stages=2, microbatches=4, example={"x": x, "y": y}) as pipe,
        pytest.warns(UserWarning, match="could not be checked: the model computes it, a cross-entropy with targets"),
    ):
        pipe.step(x=x, y=y)
