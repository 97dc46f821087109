"""The models that exactness is tested on: each is a list of stages and a batch for them.

They are small, and between them hold what goes wrong in pipelines: dropout, attention, normalisation with buffers,
outputs that are views, tuples, dicts, masks, integers and None on the way, and a value that skips stages. Rows are of
odd sizes and batches start at odd offsets, so that no microbatch lies in memory as a tensor of its own would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

WIDTH = 14


@dataclass
class Example:
    """Stages, what they are called with, and how the loss is taken."""

    stages: list[nn.Module]
    args: tuple[Any, ...]
    target: Any
    loss_fn: Callable[..., Tensor]
    skips: tuple[tuple[int, int], ...] = ()


def mlp(stages: int, rows: int) -> Example:
    modules: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)
    ]
    return Example(modules, (torch.randn(rows, WIDTH),), torch.randn(rows, WIDTH), F.mse_loss)


class Block(nn.Module):
    """Attention by SDPA and a GELU network, both with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1)]
        seen = F.scaled_dot_product_attention(*heads, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.second(x)))))


class Embed(nn.Module):
    """Token ids, which have no gradient, to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block = nn.Embedding(20, WIDTH), Block()

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.block(self.table(ids))
        return out


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm, self.head = Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.block(x)))
        return out


def _token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def transformer(stages: int, rows: int) -> Example:
    modules: list[nn.Module] = [Embed(), *(Block() for _ in range(stages - 2)), Head()]
    ids = torch.randint(20, (rows, 5))
    return Example(modules, (ids,), ids.roll(-1, 1), _token_loss)


def conv(stages: int, rows: int) -> Example:
    """The output of each stage is a view, as is the input of the next: channels and pixels change places."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.norm(self.conv(x))).transpose(2, 3)

    modules: list[nn.Module] = [Turned() for _ in range(stages)]
    x = torch.randn(rows, 4, 6, 6)
    return Example(modules, (x,), torch.randn(rows, 4, 6, 6), F.mse_loss)


class Side(nn.Module):
    """Takes two tensors and a dict of all sorts, and hands all of it on."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor, side: dict[str, Any]) -> tuple[Any, ...]:
        mask, shift = side["mask"], side["ids"].to(a.dtype).unsqueeze(-1)
        a = torch.where(mask, self.left(a), a) + shift * side["scale"]
        b = torch.tanh(self.right(b)) + a
        return a, b, {**side, "hops": side["hops"] + 1, "nothing": None}


def _side_loss(output: tuple[Any, ...], target: dict[str, Tensor]) -> Tensor:
    a, b, side = output
    assert side["nothing"] is None
    return F.mse_loss(a, target["a"]) + F.mse_loss(b, target["b"]) * side["hops"]


def several(stages: int, rows: int) -> Example:
    modules: list[nn.Module] = [Side() for _ in range(stages)]
    side = {"mask": torch.rand(rows, 1) > 0.3, "ids": torch.randint(3, (rows,)), "scale": 0.25, "hops": 0}
    a, b = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
    return Example(modules, (a, b, side), {"a": torch.randn(rows, WIDTH), "b": torch.randn(rows, WIDTH)}, _side_loss)


class Forking(nn.Module):
    """The first stage of a small U: what it makes early is needed again at the third stage from here."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> penstock.Routed:
        early = torch.relu(self.early(x))
        return penstock.Routed(torch.tanh(self.late(early)), {3: early})


class Joining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        return torch.tanh(self.join(torch.cat([x, early], -1)))


def skip(stages: int, rows: int) -> Example:
    plain = mlp(stages, rows)
    plain.stages[0], plain.stages[3] = Forking(), Joining()
    plain.skips = ((0, 3),)
    return plain


class Strange(nn.Module):
    """Returns what does not lie as torch would lay it, and reads its input so that the gradient does not either."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer, self.read, self.give = nn.Linear(WIDTH, WIDTH), READ[number % 5], GIVE[number % 4]

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        x = self.read(x)
        for other in others:
            x = x + other.sum(-1, keepdim=True)
        return self.give(torch.tanh(self.layer(x)))


READ: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.t().contiguous().t(),
    lambda x: torch.cat([x.new_ones(len(x), 2), x], 1)[:, 2:],
    lambda x: x.sum(0, keepdim=True).expand(x.shape),
    lambda x: torch.cat([x.new_ones(3), x.flatten()])[3:].view(x.shape),
    lambda x: x,
]
GIVE: list[Callable[[Tensor], Any]] = [
    lambda y: (torch.cat([y.flatten(), y.flatten()])[3 : 3 + y.numel()].view(y.shape), y[:, 1:]),
    lambda y: (y.t().contiguous().t(), y.mean(0, keepdim=True).expand(y.shape)),
    lambda y: (y, y[:, 1:4], y),
    lambda y: torch.cat([y, y], 1)[:, 1 : 1 + WIDTH],
]


def strange(stages: int, rows: int) -> Example:
    """Everything that stages hand over is a view at an odd place, with gaps, expanded, or shares its memory."""
    modules: list[nn.Module] = [*(Strange(number) for number in range(stages - 1)), Strange(3)]
    return Example(modules, (torch.randn(rows, WIDTH),), torch.randn(rows, WIDTH), F.mse_loss)


MODELS = {"strange": strange, "mlp": mlp, "transformer": transformer, "conv": conv, "several": several, "skip": skip}


def example(name: str, stages: int, rows: int, dtype: torch.dtype) -> Example:
    """The same weights and the same batch every time, in any process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        made = MODELS[name](stages, rows)

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.to(dtype) if value.is_floating_point() else value
        return torch.cat([value.new_ones(1), value.flatten()])[1:].view(value.shape)  # at an odd offset

    for module in made.stages:
        module.to(dtype)
    made.args = torch.utils._pytree.tree_map(cast, made.args)
    made.target = torch.utils._pytree.tree_map(cast, made.target)
    return made
