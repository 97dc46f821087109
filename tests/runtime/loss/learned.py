"""A loss with parameters of its own, trained in a plain loop and in a pipeline."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PenstockError

W, M, ROWS, STEPS = 6, 2, 8, 3


class Learned(nn.Module):
    """A learned weight, and the moving mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        error = F.mse_loss(output, target)
        if self.training:
            self.mean.mul_(0.9).add_(error.detach(), alpha=0.1)
        return torch.exp(-self.log_var) * error + self.log_var


def made() -> tuple[nn.Sequential, Learned]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(W, W) for _ in range(4))).double(), Learned().double()


def batch() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, ROWS, W, generator=source, dtype=torch.float64)
    return x, y


def plain(replicas: int = 1) -> dict[str, Tensor]:
    """The loop on one device; buffers follow the rows of the first replica."""
    (model, loss_fn), (x, y) = made(), batch()
    optimizer = torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        for number, (rows, target) in enumerate(zip(x.chunk(M * replicas), y.chunk(M * replicas), strict=True)):
            loss_fn.train(number < M)
            (loss_fn(model(rows), target) / (M * replicas)).backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *loss_fn.parameters()], 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {**model.state_dict(), **{f"loss_fn.{name}": value for name, value in loss_fn.state_dict().items()}}


def trained(**options: Any) -> dict[str, Tensor]:
    """The same through a pipeline: what this process has of it."""
    (model, loss_fn), (x, y) = made(), batch()
    mesh = options.get("mesh")
    if mesh is not None:
        x, y = (each.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")] for each in (x, y))
        if mesh.get_local_rank("dp"):
            nn.init.constant_(loss_fn.log_var, 5.0)  # all replicas start from the first one's
    with penstock.Pipeline(model, stages=2, microbatches=M, loss_fn=loss_fn, timeout=30, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for _ in range(STEPS):
            pipe.step(x, target=y)
            pipe.evaluate(x, target=y)  # leaves the loss's buffers alone
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        whole = pipe.full_state_dict()
        assert list(whole) == list(model.state_dict(keep_vars=True))
        last = pipe.deployment.ranks.last is not None
        assert ("loss_fn.log_var" in dict(pipe.named_parameters())) == last
        own = {name: value.clone() for name, value in pipe.state_dict().items() if name.startswith("loss_fn.")}
        return {**whole, **own}


def agrees(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def attempt(function: Any) -> str:
    try:
        function()
    except PenstockError as error:
        return str(error)
    return ""


def with_closure(kind: type, after: int = 0, **options: Any) -> tuple[str, list[str]]:
    """A plain function that trains what is in its closure, after some calls: the error, and the warnings."""
    (model, _), (x, y) = made(), batch()
    log_var: Any = torch.zeros((), dtype=torch.float64, requires_grad=True)
    log_var = nn.Parameter(log_var.detach()) if kind is nn.Parameter else log_var

    calls = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(None)
        loss = F.mse_loss(output, target)
        return loss if len(calls) <= after else torch.exp(-log_var) * loss + log_var

    with (
        penstock.Pipeline(model, stages=2, microbatches=M, loss_fn=loss_fn, timeout=30, **options) as pipe,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        said = ""
        for _ in range(1 + after):  # after each call, a step more is enough
            said = said or attempt(lambda: pipe.step(x, target=y))
    return said, [str(each.message) for each in caught if "which no stage holds" in str(each.message)]
