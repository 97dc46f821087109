"""Stages with a trap in them: one forward or backward, chosen beforehand, does something terrible instead of nothing.

Which one is counted: each stage runs its forwards in the order of microbatches, so the n-th is that of microbatch n.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6


class Boom(Exception):
    """What no library would ever raise by itself."""


def boom() -> None:
    raise Boom("the trap was sprung")


class Trap(nn.Module):
    """Hands its input on. `set` chooses when to spring; it springs once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []
        self.reset()

    def reset(self) -> None:
        self.count = 0
        self.where, self.number, self.spring = "", -1, boom

    def set(self, where: str, number: int, spring: Callable[[], Any] = boom) -> None:
        """`where` is "forward" or "backward"."""
        self.reset()
        self.where, self.number, self.spring = where, number, spring

    def step_on(self, where: str, number: int) -> None:
        if (where, number) == (self.where, self.number):
            self.where = ""
            self.spring()

    def forward(self, x: Tensor) -> Tensor:
        number, self.count = self.count, self.count + 1
        self.step_on("forward", number)
        found: Tensor = _Wire.apply(x, self, number)  # type: ignore[no-untyped-call]
        self.seen.append(weakref.ref(found))
        return found


class _Wire(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap, number: int) -> Tensor:
        ctx.trap, ctx.number = trap, number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.trap.step_on("backward", ctx.number)
        return gradient, None, None


def trapped(stages: int, dropout: float = 0.0) -> list[nn.Module]:
    """Equal weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout), Trap()) for _ in range(stages)]


def trap_of(pipe: Any, stage: int) -> Trap:
    trap = pipe.split.parts[stage].module[3]
    assert isinstance(trap, Trap)
    return trap


def batch(rows: int = 12) -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def plain_gradients(stages: int, microbatches: int, rows: int = 12) -> dict[str, Tensor]:
    """Gradient accumulation in one thread, by hand: what a step must give, and so a step after a failed one."""
    model = nn.Sequential(*trapped(stages))
    x, y = batch(rows)
    for part, goal in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        loss = nn.functional.mse_loss(model(part), goal)
        torch.autograd.backward(loss, torch.tensor(len(part) / rows))
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def differing(pipe: Any, wanted: dict[str, Tensor]) -> list[str]:
    """The parameters of this process whose gradient is not, bit for bit, the wanted one."""
    return [
        name
        for name, parameter in pipe.named_parameters()
        if parameter.grad is None or not torch.equal(parameter.grad, wanted[name])
    ]
