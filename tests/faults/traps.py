"""Stages with a trap in them: one forward or backward, chosen beforehand, does something terrible instead of nothing.

Which one is counted: each stage runs its forwards in the order of microbatches, so the n-th is that of microbatch n.
"""

from __future__ import annotations

import os
import signal
import time
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


KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def die(say: Callable[[Any], None], how: int) -> Callable[[], None]:
    """A trap's spring that tells the time, by the clock that all processes of this machine read, and ends a process."""

    def spring() -> None:
        say(("fault", time.monotonic()))
        os.kill(os.getpid(), how)

    return spring


class Plan:
    """When to spring. An object of its own, because a failed step puts a module's attributes back."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Tensor]] = []
        self.count, self.where, self.number, self.spring = 0, "", -1, boom


class Trap(nn.Module):
    """Hands its input on. `set` chooses when to spring; it springs once."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = Plan()

    @property
    def seen(self) -> list[weakref.ref[Tensor]]:
        return self.plan.seen

    def reset(self) -> None:
        vars(self.plan).update(count=0, where="", number=-1, spring=boom)

    def set(self, where: str, number: int, spring: Callable[[], Any] = boom) -> None:
        """`where` is "forward" or "backward"."""
        self.reset()
        vars(self.plan).update(where=where, number=number, spring=spring)

    def step_on(self, where: str, number: int) -> None:
        if (where, number) == (self.plan.where, self.plan.number):
            self.plan.where = ""
            self.plan.spring()

    def forward(self, x: Tensor) -> Tensor:
        number, self.plan.count = self.plan.count, self.plan.count + 1
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
    trap = pipe.deployment.staged.parts[stage].module[3]
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
