"""Stages that share memory in their ways, each trained beside a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bugs.small import WIDTH, batch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

ROWS = 4


class Shifted(nn.Module):
    """A layer, and a parameter whose gradient autograd takes as a view of what arrives."""

    def __init__(self, use: str, width: int = WIDTH) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.shift = nn.Parameter(torch.randn(width).double())
        self.use = USES[use]

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.layer, self.shift)


USES: dict[str, Callable[[Tensor, nn.Module, Tensor], Tensor]] = {
    "index": lambda x, layer, p: layer(x) + p[None],
    "unsqueeze": lambda x, layer, p: layer(x) + p.unsqueeze(0),
    "view": lambda x, layer, p: layer(x) + p.view(1, -1),
    "cat": lambda x, layer, p: torch.cat([layer(x), p[None]])[:-1] + p[None],
    "input": lambda x, layer, p: layer(torch.tanh(x.flatten() + p[None].flatten()).view(x.shape)),
    "passed": lambda x, layer, p: x.flatten().add(p[None].flatten()).view(x.shape),
}


def trained(
    step: Callable[[Tensor, Tensor], Any], parameters: list[Tensor], steps: int = 3, width: int = WIDTH
) -> list[list[Tensor]]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found = []
    for number in range(steps):
        x, y = (rows.repeat(1, -(-width // WIDTH))[:, :width] for rows in batch(ROWS))
        step(x + number, y)
        found.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return found


def beside_a_plain_loop(
    stages: list[nn.Module],
    schedule: str,
    *,
    microbatches: int = 4,
    parameters: list[nn.Parameter] | None = None,
    **options: Any,
) -> None:
    """Three steps of SGD: all gradients are those of the loop that takes one microbatch after the other."""
    expected = plain_gradients(copy.deepcopy(stages), microbatches)
    options = {"loss_fn": F.mse_loss, **options}
    pipe = penstock.Pipeline(stages, microbatches=microbatches, schedule=schedule, **options)
    own = [p for stage in stages for p in stage.parameters()] if parameters is None else parameters
    found = trained(partial(step_of, pipe), own)
    pipe.close()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def plain_gradients(stages: list[nn.Module], microbatches: int, width: int = WIDTH) -> list[list[Tensor]]:
    """What a loop gets that takes one microbatch after the other."""
    plain = nn.Sequential(*stages)
    own = list(plain.parameters())

    def loop(x: Tensor, y: Tensor) -> None:
        for rows, target in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
            loss = F.mse_loss(plain(rows.clone()), target) / microbatches
            # not by backward(): autograd itself lets several parameters adopt one gradient
            for parameter, gradient in zip(own, torch.autograd.grad(loss, own, allow_unused=True), strict=True):
                if gradient is not None:
                    parameter.grad = gradient + (0 if parameter.grad is None else parameter.grad)

    return trained(loop, own, width=width)


class Stage(nn.Module):
    """A layer whose output, or whose input, is treated in some way."""

    def __init__(self, before: str = "", after: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.before, self.after = before, after
        self.kept: Any = torch.zeros(1, WIDTH).double()
        self.register_buffer("counted", torch.zeros(1, WIDTH).double())

    def forward(self, *given: Any) -> Any:
        x = given if len(given) > 1 else given[0]  # a tuple is unpacked between stages, but not by nn.Sequential
        return AFTER[self.after](self, self.layer(BEFORE[self.before](self, x)))


def step_of(pipe: penstock.Pipeline, x: Tensor, y: Tensor) -> None:
    pipe.step(x, target=y)


def write_into(memory: Tensor, value: Tensor) -> Tensor:
    written = memory.detach()
    return written.copy_(value)


def _keep(stage: Stage, value: Tensor) -> Tensor:
    stage.kept = stage.kept.detach().copy_(value)  # the attribute itself leaves
    return stage.kept


def _in_a_list(stage: Stage, value: Tensor) -> Tensor:
    if isinstance(stage.kept, Tensor):
        stage.kept = [{"memory": stage.kept}]
    return write_into(stage.kept[0]["memory"], value).view(value.shape)


def _count_in_place(stage: Stage, value: Tensor) -> tuple[Tensor, Tensor]:
    return value, stage.kept.add_(value.detach())


def _count_in_buffer(stage: Stage, value: Tensor) -> tuple[Tensor, Tensor]:
    stage.counted += value.detach()
    return value, stage.counted[:, 1:]


AFTER: dict[str, Callable[[Stage, Tensor], Any]] = {
    "": lambda stage, value: torch.tanh(value),
    "written": lambda stage, value: write_into(stage.kept, value),
    "view": lambda stage, value: write_into(stage.kept, value).view(WIDTH).view(1, WIDTH),
    "attribute": _keep,
    "list": _in_a_list,
    "counted": _count_in_place,
    "buffer": _count_in_buffer,
    "twice": lambda stage, value: (value, value),
    "slice": lambda stage, value: (value, value[:, :2]),
    "reversed": lambda stage, value: (value[:, 1:], value),
    "detached": lambda stage, value: (value, value.detach()),
    "chunks": lambda stage, value: (value[:, :2], value[:, 2:]),
}


BEFORE: dict[str, Callable[[Stage, Any], Tensor]] = {
    "": lambda stage, value: value,
    "sum": lambda stage, value: value[0] + value[1].sum(-1, keepdim=True),
    "first": lambda stage, value: value[0].mul_(2.0) + value[1].sum(-1, keepdim=True),
    "second": lambda stage, value: value[1].mul_(2.0).sum(-1, keepdim=True) + value[0],
    "join": lambda stage, value: torch.cat([value[0].mul_(2.0), value[1]], -1),
    "longer": lambda stage, value: value[1].relu_() + value[0].sum(-1, keepdim=True),
}
