"""Losses that are not a mean over rows: the loss and all gradients are those of the whole batch in one piece."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tiers import by_turns
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

CLASSES, WIDTH, LENGTH = 5, 6, 4
Loss = Callable[..., Tensor]


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).double()


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def targets(rows: int, ignored: int = -100, seed: int = 0) -> Tensor:
    """Unevenly ignored: the first microbatch mostly, the second altogether, the third here and there."""
    torch.manual_seed(seed)
    found = torch.randint(CLASSES, (rows, LENGTH))
    share = rows // 3 + (rows % 3 > 0)
    found[:share, 1:] = ignored
    found[share : 2 * share] = ignored
    found[-1, 0] = ignored
    return found


def trained(net: nn.Module, loss: Loss, x: Tensor, y: Any, **extra: Any) -> tuple[Tensor, list[Tensor]]:
    """The whole batch in one piece."""
    net.zero_grad()
    value = loss(net(x), y, **extra)
    value.backward()
    found = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    net.zero_grad()
    return value.detach(), found


def compared(loss: Loss, rows: int = 8, target: Callable[..., Any] = targets, **options: Any) -> None:
    """Two steps of a pipeline and an evaluation against the whole batch."""
    net = model()
    shape = {"stages": 2, "microbatches": 3, **options}
    with penstock.Pipeline(net, loss_fn=loss, **shape) as pipe:
        for step in range(2):
            x, y = torch.randn(rows, LENGTH, WIDTH).double(), target(rows, seed=step)
            result = pipe.step(x, target=y)
            found = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
            close((result.loss, found), trained(net, loss, x, y))
            close(pipe.evaluate(x, target=y).loss, result.loss)


def by_token(loss: Loss) -> Loss:
    """As users write it."""
    return lambda output, y: loss(output.flatten(0, 1), y.flatten())


def by_channel(loss: Loss) -> Loss:
    return lambda output, y: loss(output.transpose(1, 2), y)


def of_logs(loss: Loss) -> Loss:
    return lambda output, y: loss(output.log_softmax(-1).transpose(1, 2), y)


class FirstToken(nn.Module):
    """A model whose output torch's own losses take as it is."""

    def __init__(self, logs: bool) -> None:
        super().__init__()
        self.logs = logs

    def forward(self, x: Tensor) -> Tensor:
        x = x.log_softmax(-1) if self.logs else x
        return x.transpose(1, 2)


WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.5, 0.0]).double()
OWN: dict[str, tuple[Loss, bool]] = {
    "module": (nn.CrossEntropyLoss(), False),
    "classes": (nn.CrossEntropyLoss(weight=WEIGHT), False),
    "smooth": (nn.CrossEntropyLoss(label_smoothing=0.1), False),
    "smooth classes": (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), False),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), False),
    "function": (F.cross_entropy, False),
    "partial": (partial(F.cross_entropy, weight=WEIGHT), False),
    "partial of partial": (partial(partial(F.cross_entropy, weight=WEIGHT), reduction="sum"), False),
    "likelihood": (nn.NLLLoss(WEIGHT), True),
    "likelihood function": (F.nll_loss, True),
}


@pytest.mark.parametrize("name", OWN)
def test_torchs_own_losses_count_what_they_are_a_mean_over(name: str) -> None:
    loss, logs = OWN[name]
    net = nn.Sequential(*model(), FirstToken(logs))
    with penstock.Pipeline(net, stages=2, microbatches=3, loss_fn=loss) as pipe:
        for step in range(2):
            x, y = torch.randn(8, LENGTH, WIDTH).double(), targets(8, seed=step)
            close(pipe.evaluate(x, target=y).loss, trained(net, loss, x, y)[0])
            result = pipe.step(x, target=y)
            found = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
            close((result.loss, found), trained(net, loss, x, y))


WRITTEN: dict[str, Loss] = {
    "lambda": by_token(F.cross_entropy),
    "module": by_token(nn.CrossEntropyLoss()),
    "classes": by_channel(nn.CrossEntropyLoss(weight=WEIGHT)),
    "sum": by_token(partial(F.cross_entropy, reduction="sum")),
    "half": by_token(lambda o, y: F.cross_entropy(o, y) * 0.5),
    "divided": by_token(lambda o, y: F.cross_entropy(o, y) / 7),
    "likelihood": of_logs(nn.NLLLoss()),
    "another type": by_token(lambda o, y: F.cross_entropy(o, y).to(torch.complex128).real + 0),
    "narrow": lambda o, y: F.cross_entropy(o.flatten(0, 1), y.to(torch.uint8).long().where(y >= 0, -100).flatten()),
}


PLAIN = [name for name in WRITTEN if name != "another type"]
OPTIONS: list[dict[str, Any]] = [{}, {"schedule": "zb-h1"}, {"recompute": "always"}]


@pytest.mark.parametrize(
    ("name", "options"),
    by_turns(PLAIN, OPTIONS, fast=[(name, OPTIONS[row % 3]) for row, name in enumerate(PLAIN)]),
    ids=str,
)
def test_a_cross_entropy_inside_of_a_loss_is_found(name: str, options: dict[str, Any]) -> None:
    compared(WRITTEN[name], **options)
