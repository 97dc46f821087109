"""The layers that random models are made of: each takes (rows, width) and returns as much, unless it says otherwise.

Every one does something that a pipeline could get wrong. Their sources are copied into the programs that the fuzz
prints, so each stands by itself, with nothing but torch, `nn`, `F` and `penstock` around it; `report` is what the
program calls with a loss from inside a stage, and `armed` says whether a trap should spring.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock


def report(value: Tensor) -> None:
    """A loss from inside a stage."""
    penstock.add_loss("extra", value)


def armed(where: str) -> bool:
    """Whether a trap springs there, now."""
    return False


class Dense(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Gelu(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class BatchNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class Drop(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x))


class Noise(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) * self.scale if self.training else x


class Bias(nn.Module):
    """Autograd hands a view of the output's gradient on to the parameter."""

    def __init__(self, width: int, how: int = 0) -> None:
        super().__init__()
        self.linear, self.b, self.how = nn.Linear(width, width, bias=False), nn.Parameter(torch.randn(width)), how

    def forward(self, x: Tensor) -> Tensor:
        b = (self.b, self.b[None], self.b.unsqueeze(0), self.b.view(1, -1), self.b.expand_as(x))[self.how]
        return self.linear(x) + b


class BiasOnly(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b[None]


class Cat(nn.Module):
    """Part of the gradient of the whole is the parameter's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.p = nn.Linear(width, width), nn.Parameter(torch.randn(2, width))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.linear(x), self.p])
        return both[:-2] + both[-2:].sum(0)


class CatFirst(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(1, width))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.p, x])
        return both[1:] * both[:1]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.linear(x))


class Square(nn.Module):
    """A bare product with a parameter, and its transpose."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x @ self.w, self.w.t())


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.s


class InPlace(nn.Module):
    """Writes to what it has made itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.relu = nn.Linear(width, width), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x[:, 0] = 0.5
        x += 0.25
        return self.relu(x)


class WritesInput(nn.Module):
    """Writes to what it was given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(0.5))


class ReluOfInput(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.relu, self.linear = nn.ReLU(inplace=True), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.relu(x))


class Part(nn.Module):
    """Returns a view of something larger."""

    def __init__(self, width: int, step: int = 1) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(width, 2 * width), step

    def forward(self, x: Tensor) -> Tensor:
        both = self.linear(x)
        return both[:, ::2] if self.step == 2 else both[:, : both.shape[1] // 2]


class Columns(nn.Module):
    """Returns what lies in memory column by column."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.w @ x.t()).t()


class Same(nn.Module):
    """Returns a view of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape)


class Count(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.n += 1
        return self.linear(x) * (1 + 0.1 * self.n)


class Mean(nn.Module):
    """A moving mean: a buffer that is written to, or replaced."""

    def __init__(self, width: int, replaced: bool = False) -> None:
        super().__init__()
        self.linear, self.replaced = nn.Linear(width, width), replaced
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        now = 0.1 * x.detach().mean(0)
        if self.training and self.replaced:
            self.mean = 0.9 * self.mean + now
        elif self.training:
            self.mean.mul_(0.9).add_(now)
        return self.linear(x - self.mean)


class Calls(nn.Module):
    """Plain attributes: a number and a list."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.calls, self.log = nn.Linear(width, width), 0, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.log.append(1 / self.calls)
        return self.linear(x) * (1 + self.log[-1])


class Seen(nn.Module):
    """A plain attribute that is a tensor, which is written to, or replaced."""

    def __init__(self, width: int, replaced: bool = False) -> None:
        super().__init__()
        self.linear, self.seen, self.replaced = nn.Linear(width, width), torch.zeros(()), replaced

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.replaced:
            self.seen = self.seen + len(x)
        elif self.training:
            self.seen += len(x)
        return self.linear(x) + 0.01 * self.seen.to(x.dtype)


class Frozen(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class HalfFrozen(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.linear.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Detached(nn.Module):
    """Its parameters get no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).detach()


class Branch(nn.Module):
    """Which of its parameters are used depends on the data."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.one(x) if x.detach().sum() > 0 else self.other(x))


class Extra(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        report(0.1 * x.square().mean())
        return torch.tanh(x)


class Weighted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Checkpointed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Hooked(nn.Module):
    """Hooks on the module, on a parameter and on a tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.linear.register_forward_hook(lambda module, inputs, output: output * 0.5)
        self.linear.weight.register_hook(lambda gradient: gradient * 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.75)
        return x


class HookedInput(nn.Module):
    """Hooks on what it was given, which others do not read: they change the gradient that goes back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return torch.tanh(self.linear(x))


class Attend(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width // 2, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        pair = x.reshape(len(x), 2, -1)
        return x + self.attention(pair, pair, pair, need_weights=False)[0].reshape(x.shape)


class Convolve(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x.unsqueeze(1))).sum(1)


class Recur(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width // 2, width // 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.reshape(len(x), 2, -1))[0].reshape(x.shape)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return w * x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gradient * w * 3 * x**2, (gradient * x**3).sum(0)


class Custom(nn.Module):
    """A function with a backward of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.w = nn.Linear(width, width), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(torch.tanh(self.linear(x)), self.w)


class Table(nn.Module):
    """Takes (rows, 2) whole numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(10, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).sum(1)


class Scratch(nn.Module):
    """Without gradient, into memory that it uses again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.memory = torch.zeros(64, width)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        self.memory = self.memory.to(x.dtype)
        return torch.tanh(x, out=self.memory[: len(x)])


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Tensor) -> Tensor:
        ctx.memory = memory
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.mul(gradient, 2, out=ctx.memory[: len(gradient)]), None


class Rewrites(nn.Module):
    """A backward that writes into memory which it uses again; of a stage the first, so that this gradient is sent."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.memory = nn.Linear(width, width), torch.zeros(64, width)

    def forward(self, x: Tensor) -> Tensor:
        self.memory = self.memory.to(x.dtype)
        return self.linear(Double.apply(x, self.memory))


# Two values from layer to layer


class Fork(nn.Module):
    """Returns several values: one tensor twice, a tensor and a view of it, two of their own, or a dict."""

    def __init__(self, width: int, how: int = 0) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(width, width), how

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        if self.how == 4:
            return {"one": h, "none": None, "number": 2}
        return h, (h, h[:, :2], torch.tanh(x), h.detach())[self.how]


class Join(nn.Module):
    """Takes what Fork returns; may write to the first or to the second before it uses both."""

    def __init__(self, width: int, writes: int = 0) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(width, width), writes

    def forward(self, one: Any, other: Any = None) -> Tensor:
        if isinstance(one, dict):
            return self.linear(one["one"]) * one["number"]
        if isinstance(one, tuple):
            one, other = one
        if self.writes == 1:
            one.mul_(2)
        if self.writes == 2:
            other.add_(1)
        return self.linear(one) + other.mean(1, keepdim=True)


# Around the layers of a stage


class Several(nn.Sequential):
    """Layers of which the first takes several values."""

    def forward(self, *x: Any) -> Any:
        return super().forward(x if len(x) > 1 else x[0])


class Side(nn.Module):
    """A stage with an input of its own beside the flow."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *x: Any, side: Any = None) -> Tensor:
        y = self.inner(*x)
        return y if side is None else y * side[:, None]


class Sends(nn.Module):
    """A stage whose output also goes to a later one."""

    def __init__(self, inner: nn.Module, to: int) -> None:
        super().__init__()
        self.inner, self.to = inner, to

    def forward(self, *x: Any) -> Any:
        y = self.inner(*x)
        return penstock.Routed(y, {self.to: y})


class Takes(nn.Module):
    """The stage that it goes to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any, skipped: Tensor) -> Tensor:
        return self.inner(x) + skipped


class Trap(nn.Module):
    """Fails in the forward or the backward, when it is armed."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *x: Any) -> Any:
        y = self.inner(*x)
        if armed("forward"):
            raise ArithmeticError("the trap was sprung")
        if armed("backward") and y.requires_grad:
            y.register_hook(spring)
        return y


def spring(gradient: Tensor) -> Tensor:
    raise ArithmeticError("the trap was sprung")


# Where a whole model has them


class Group(nn.Module):
    """Holds layers, and has no forward."""

    def __init__(self, first: nn.Module, *others: nn.Module) -> None:
        super().__init__()
        self.first = first
        for number, other in enumerate(others):
            self.add_module(f"h{number}", other)


def inside(holder: nn.Module) -> Any:
    """The layers of a container, and of those in it."""
    for child in holder._modules.values():
        held = isinstance(child, nn.ModuleList | nn.ModuleDict) or type(child).__name__ == "Group"
        yield from inside(child) if held else (child,)
