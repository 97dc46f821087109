"""Models for the graph fallback; most of them replay refuses: tensors take other ways than through return values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.linear(self.norm(x))))


class Trunk(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class StashingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.stash = out.square().mean()
        return out


class Stashes(Trunk):
    """Blocks leave a tensor on themselves, which the parent reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StashingBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return out, sum(block.stash for block in self.blocks)


class Hooked(Trunk):
    """Hooks collect what blocks return."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, output: self.features.append(output))

    def forward(self, x: Tensor) -> Any:
        self.features.clear()
        out = super().forward(x)
        return {"out": out, "features": torch.stack(self.features)}


class AppendingBlock(Block):
    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        out = super().forward(x)
        kept.append(out * 2)
        return out


class Appends(Trunk):
    """A list is handed to the blocks, which append to it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AppendingBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        kept: list[Tensor] = []
        for block in self.blocks:
            x = block(x, kept)
        return self.head(x + kept[0] * kept[-1])


class UNet(nn.Module):
    """Down, bottom, up, with concatenating skips and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.layer(3, 4), self.layer(4, 4)])
        self.bottom = self.layer(4, 4)
        self.up = nn.ModuleList([self.layer(8, 4), self.layer(8, 4)])
        self.out = nn.Conv2d(4, 2, 1)

    def layer(self, inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up in self.up:
            x = up(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.out(x)


@dataclass
class Scores:
    logits: Tensor
    name: str
    extra: tuple[Tensor | None, int] = (None, 0)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Trunk(), Trunk()

    def forward(self, left: Tensor, right: Tensor, *, scale: float = 1.0, mask: Tensor | None = None) -> Scores:
        out = self.left(left) * scale + self.right(right)
        return Scores(out if mask is None else out * mask, "both", (left, 3))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.trunk = Trunk()
        self.back = nn.Linear(3, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        mask = torch.ones(ids.shape[1], WIDTH)
        mask[0] = positions.sum() * 0.1  # in place, of what depends on the inputs' sizes alone
        return self.head(self.back(self.trunk(self.embedding(ids) * mask)))


class InPlace(nn.Module):
    """One memory that is written all the way down, also through views and after it was stored."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Any:
        x.mul_(2.0)
        h = self.layers[0](x)
        flat = h.view(-1)
        for layer in self.layers[1:]:
            h += layer(h.clone())
            h[..., :2].mul_(0.5)
        return flat.reshape(h.shape) + x, h.relu()


class Averages(nn.Module):
    """A buffer of an inner module that the forward replaces instead of writing into it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().flatten(0, -2).mean(0)
        return x - self.mean


class Counts(nn.Module):
    """A buffer that the forward changes under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.average = Averages()

    def forward(self, x: Tensor) -> Tensor:
        out = self.trunk(x) * self.scale
        with torch.no_grad():
            self.seen.mul_(0.9).add_(out.mean(tuple(range(out.dim() - 1))))
        return self.average(out + self.seen)


def rows(count: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))


def ids(count: int, length: int) -> Tensor:
    return torch.randint(0, 11, (count, length), generator=torch.Generator().manual_seed(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "stashes": (Stashes, lambda n: (rows(n, WIDTH)(),)),
    "hooks": (Hooked, lambda n: (rows(n, WIDTH)(),)),
    "appends": (Appends, lambda n: (rows(n, WIDTH)(),)),
    "unet": (UNet, lambda n: (rows(n, 3, 8, 8)(),)),
    "two inputs": (TwoInputs, lambda n: (rows(n, WIDTH)(), rows(n, WIDTH)() + 1)),
    "tied": (Tied, lambda n: (ids(n, 5 + n),)),
    "dropout": (lambda: Trunk(dropout=0.5), lambda n: (rows(n, WIDTH)(),)),
    "in place": (InPlace, lambda n: (rows(n, WIDTH)(),)),
    "buffers": (Counts, lambda n: (rows(n, 2, WIDTH)(),)),
}


def make(name: str) -> tuple[nn.Module, Callable[[int], tuple[Any, ...]]]:
    torch.manual_seed(0)
    build, batch = MODELS[name]
    return build(), batch
