"""Models as torchgpipe's users write them, and a training loop of theirs that takes `GPipe` from where it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.compat.torchgpipe import GPipe
from penstock.compat.torchgpipe.skip import Namespace, pop, skippable, stash

CHUNKS = 4


@skippable(stash=["skip"])
class Down(nn.Module):
    def __init__(self, width: int, wider: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, wider, 3, padding=1), nn.BatchNorm2d(wider)

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.norm(self.conv(x)))
        yield stash("skip", x)
        return F.max_pool2d(x, 2)


@skippable(pop=["skip"])
class Up(nn.Module):
    def __init__(self, wider: int, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(wider, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return torch.relu(self.norm(self.conv(torch.cat([F.interpolate(x, scale_factor=2), skip], dim=1))))


def unet() -> nn.Sequential:
    """Eight layers; the skips go 0 -> 6, 1 -> 5 and 2 -> 4."""
    torch.manual_seed(0)
    a, b, c = Namespace(), Namespace(), Namespace()
    return nn.Sequential(
        Down(1, 2).isolate(a),
        Down(2, 3).isolate(b),
        Down(3, 4).isolate(c),
        nn.Conv2d(4, 4, 3, padding=1),
        Up(8, 3).isolate(c),
        Up(6, 2).isolate(b),
        Up(4, 2).isolate(a),
        nn.Conv2d(2, 1, 1),
    ).double()


@skippable(stash=["early"])
class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        x = self.conv(x)
        yield stash("early", x)
        return x


@skippable(pop=["early"], stash=["late"])
class Cell(nn.Module):
    """As in AmoebaNet: a cell reads the output of the cell before the last, and passes the last one on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        early = yield pop("early")
        yield stash("late", x)
        return torch.tanh(self.conv(x)) + early


@skippable(pop=["late"])
class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> Any:
        late = yield pop("late")
        return self.conv(x * late)


def cells() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Stem(), nn.Tanh(), nn.Conv2d(3, 3, 1), Cell(), nn.Conv2d(3, 3, 1), nn.Tanh(), Head()).double()


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    block = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU()]
    return nn.Sequential(*block, nn.Flatten(), nn.Linear(32, 2)).double()


def batches(rows: int = 8, count: int = 4) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(rows, 1, 8, 8, generator=generator, dtype=torch.float64)


def train(model: nn.Module, call: Callable[[Tensor], Any], rows: int = 8, steps: int = 4) -> list[float]:
    """The losses of a few steps of a training loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x in batches(rows, steps):
        optimizer.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_chunks(model: nn.Module, chunks: int = CHUNKS) -> Callable[[Tensor], Tensor]:
    """The plain model on what `chunk` makes of a batch."""
    return lambda x: torch.cat([model(piece) for piece in x.chunk(chunks)])


def linear() -> nn.Linear:
    return nn.Linear(1, 1)


def two(**options: Any) -> GPipe:
    return GPipe(nn.Sequential(linear(), linear()), [1, 1], devices=["cpu", "cpu"], **options)
