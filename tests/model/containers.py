"""Models whose blocks are in containers of every kind, in the styles of public code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, WORDS, LENGTH = 8, 16, 4


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def blocks(count: int = 4) -> list[Block]:
    return [Block() for _ in range(count)]


class GPT(nn.Module):
    """A list inside of a dict, and a head that is tied to what stands in the dict."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, D),
                "wpe": nn.Embedding(LENGTH, D),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList(blocks()),
                "ln_f": nn.LayerNorm(D),
            }
        )
        self.lm_head = nn.Linear(D, WORDS, bias=False)
        if tied:
            self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts.drop(parts.wte(ids) + parts.wpe(torch.arange(ids.shape[1])))
        for block in parts.h:
            x = block(x)
        out: Tensor = self.lm_head(parts.ln_f(x))
        return out


class Tied(GPT):
    def __init__(self) -> None:
        super().__init__(tied=True)


class DictInDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict(
            {
                "stem": nn.ModuleDict({"linear": nn.Linear(D, D), "norm": nn.LayerNorm(D)}),
                "body": nn.ModuleDict({"layers": nn.ModuleDict({f"layer_{n}": b for n, b in enumerate(blocks())})}),
                "10": nn.Linear(D, D),
                "2": nn.Linear(D, D),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        net: Any = self.net
        x = net["stem"]["norm"](net["stem"]["linear"](x))
        for block in net["body"]["layers"].values():
            x = block(x)
        out: Tensor = net["2"](torch.tanh(net["10"](x)))
        return out


class ListOfLists(nn.Module):
    """Stages of blocks; also the layers of (attention, feed-forward) pairs of many transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(blocks(2)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        stages: Any = self.stages
        for stage in stages:
            for block in stage:
                x = block(x)
        return x


class DictsInList(nn.Module):
    """Each layer is a dict of a norm and a mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(D), "mixer": Block()}) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.layers
        for layer in layers:
            x = x + layer["mixer"](layer["norm"](x))
        return x


class DictOfSequentials(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = {"encoder": nn.Sequential(*blocks(4)), "decoder": nn.Sequential(*blocks(2)), "head": nn.Linear(D, D)}
        self.parts = nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


class Group(nn.Module):
    """No forward: it only holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.first, self.second = blocks(2)
        self.more = nn.Module()
        self.more.last = Block()
        self.rest = blocks(2)  # a plain list, of what is registered beside it
        for number, block in enumerate(self.rest):
            self.add_module(f"rest{number}", block)


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.group = Group()

    def forward(self, x: Tensor) -> Tensor:
        group: Any = self.group
        x = group.more.last(group.second(group.first(x * group.scale)))
        for block in group.rest:
            x = block(x)
        return x


class Gained(nn.Module):
    """Parameters in a list and in a dict beside the layers that they belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(D)) for _ in range(4))
        self.shifts = nn.ParameterDict({f"{number}": nn.Parameter(torch.zeros(D)) for number in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        for number, (layer, gain) in enumerate(zip(self.layers, self.gains, strict=True)):
            x = x + gain * torch.tanh(layer(x)) + self.shifts[f"{number}"]
        return x


class Loops(nn.Module):
    """A block with a list over which its own forward goes: one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.inner:
            y = torch.tanh(layer(y))
        return x + y


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Loops() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class SequentialsInList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Backbone(nn.Module):
    """Its own forward is that of a classifier, which nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two, self.head = nn.Linear(D, D), Block(), Block(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.two(self.one(self.stem(x))))
        return out


class Entered(nn.Module):
    """Calls what is inside of its backbone, as detectors do, and never the backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbones, self.out = nn.ModuleList([Backbone(), Backbone()]), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        for backbone in self.backbones:
            inner: Any = backbone
            x = inner.two(inner.one(inner.stem(x)))
        out: Tensor = self.out(x)
        return out


class Tower(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks, self.down = nn.ModuleList(blocks(depth)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.down(x))


class Towers(nn.Module):
    """Stages of very different depth, as vision transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Tower(depth) for depth in (1, 1, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Experts(nn.Module):
    """A mixture of experts that calls those which get tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 4), nn.ModuleList(nn.ModuleList(blocks(2)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.gate(x), -1)
        chosen, out, experts = weights.argmax(-1), torch.zeros_like(x), self.experts
        for number in range(len(experts)):
            rows = torch.where(chosen == number)[0]
            if len(rows):
                expert: Any = experts[number]
                out[rows] += expert[1](expert[0](x[rows])) * weights[rows, number, None]
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(), Experts()])
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.last(x)
        return out


EVERY: list[type[nn.Module]] = [
    GPT, Tied, DictInDict, ListOfLists, DictsInList, DictOfSequentials, Grouped, Gained, Looped, SequentialsInList,
    Entered, Towers,
]  # fmt: skip


def batch(kind: type[nn.Module]) -> Tensor:
    return torch.randint(0, WORDS, (4, LENGTH)) if issubclass(kind, GPT) else torch.randn(4, D)
