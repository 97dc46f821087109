"""A network with batch norms, trained on whole batches in a plain loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

ROWS = 11
EXACT = penstock.BatchOptions(batch_norm="exact")


def network(everywhere: bool = True) -> nn.Sequential:
    """Batch norms in each of two stages of three layers, or in the first alone."""
    torch.manual_seed(0)
    second = nn.BatchNorm1d(6) if everywhere else nn.LayerNorm(6)
    return nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), second, nn.Linear(6, 6)
    ).double()


def batch(step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, rows, 6, generator=numbers, dtype=torch.float64)
    return x * torch.arange(1, rows + 1).unsqueeze(1), y  # rows that differ: microbatches have other statistics


def plain_run(model: nn.Module, steps: int = 2, rows: int = ROWS) -> dict[str, Tensor]:
    """Training of the plain model on whole batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, y = batch(step, rows)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return state_of(model)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and gradients."""
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**model.state_dict(), **gradients}


def train(pipe: penstock.Pipeline) -> None:
    """The two steps that `plain_run` makes."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in range(2):
        x, y = batch(step)
        optimizer.zero_grad()
        pipe.step(x, target=y)
        optimizer.step()
