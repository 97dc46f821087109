"""Small nets that hold what goes wrong when a model is cut: skips, in-place work, ties, odd outputs, hidden state."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock

W = 8


class Chain(nn.Module):
    """Blocks one after the other; the tests below override what they are about."""

    def __init__(self, blocks: int = 4, block: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(W, W) if block is None else block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """The classic one: skips are concatenated, activations work in place."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = double_conv(2, 4), double_conv(4, 8), double_conv(8, 8)
        self.up2, self.conv2 = nn.ConvTranspose2d(8, 8, 2, 2), double_conv(16, 4)
        self.up1, self.conv1 = nn.ConvTranspose2d(4, 4, 2, 2), double_conv(8, 4)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        deep = self.middle(F.max_pool2d(second, 2))
        back = self.conv2(torch.cat([second, self.relu(self.up2(deep))], 1))
        back = self.conv1(torch.cat([first, F.relu_(self.up1(back))], 1))
        out: Tensor = self.head(back)
        return out


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolutions = double_conv(inputs, outputs)
        self.short = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.convolutions(x) + self.short(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.relu = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 8), Residual(8, 8))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.relu(self.norm(self.stem(x)))))
        out: Tensor = self.fc(torch.flatten(self.pool(x), 1))
        return out


class TwoInputs(nn.Module):
    """Siamese: one block sees both inputs, and both reach the end."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))
        self.blocks = nn.ModuleList(nn.Linear(W, W) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        a, b = self.shared(left), self.shared(right)
        for block in self.blocks:
            a = torch.relu(block(a)) + b
        return {"near": a * self.scale, "far": b}


@dataclass
class Answer:
    value: Tensor
    note: str = ""


class Tied(nn.Module):
    """Embedding and head are one matrix; the answer is a dataclass."""

    def __init__(self, words: int = 20, blocks: int = 3, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, W)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(W), nn.Linear(W, W), nn.GELU()) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(W), nn.Linear(W, words, bias=False)
        self.head.weight = self.embed.weight
        if frozen:
            self.head = nn.Linear(W, words)
            self.embed.requires_grad_(False)

    def forward(self, ids: Tensor) -> Answer:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return Answer(self.head(self.norm(x)), "fine")


class LowRank(nn.Module):
    """A frozen layer and a small one beside it that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(W, W).requires_grad_(False)
        self.down, self.up = nn.Linear(W, 2, bias=False), nn.Linear(2, W, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Shared(Chain):
    """One block for all layers."""

    def __init__(self) -> None:
        super().__init__(1)
        self.first, self.last = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(4):
            x = x + torch.tanh(self.blocks[0](x))
        out: Tensor = self.last(x)
        return out


class Several(nn.Module):
    """A unit that returns one tensor twice, its input, None, plain values and something that nobody needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        y = torch.tanh(self.linear(x))
        return y, y, x, None, {"rows": x.shape[0], "name": "block"}, y * 2


class Tuples(Chain):
    def __init__(self) -> None:
        super().__init__(4, Several)

    def forward(self, x: Tensor) -> Tensor:
        kept = x
        for block in self.blocks:
            y, again, passed, nothing, plain, _ = block(x)
            assert nothing is None
            assert plain == {"rows": x.shape[0], "name": "block"}
            x, kept = y + again * plain["rows"], kept + passed
        return x + kept


class InPlace(Chain):
    """The glue writes into what units return, also through views, and into the input."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        kept = []
        for block in self.blocks:
            y = block(x)
            kept.append(y)
            view = y.view(-1)[: y.numel() // 2]
            view.mul_(2.0).add_(1.0)
            y[:, 0] = 0.0
            x = torch.tanh(y)
        return x + kept[0] + kept[1]


class AbsentAttributes(Chain):
    """The glue reads types, devices and shapes off parameters, and one parameter itself."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            weight = self.blocks[-1].weight
            x = x.to(dtype=weight.dtype, device=weight.device).view(-1, weight.shape[1])
            x = torch.tanh(block(x))
        return x @ self.blocks[0].weight


def square(output: Any, _: Any = None) -> Tensor:
    """A loss on whatever a net returns."""
    if isinstance(output, dict):
        return output["near"].square().mean() + output["far"].mean()
    value: Tensor = output.value if isinstance(output, Answer) else output
    return value.square().mean()


def rows(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, W)))


def trains(model: nn.Module, *inputs: Tensor, steps: int = 2, stages: int = 2, **options: Any) -> float:
    """How far the pipeline's gradients and losses are from the plain model's, for two steps."""
    plain = copy.deepcopy(model)
    options = {
        "cut_options": penstock.CutOptions(method="replay"),
        "microbatches": 2,
        "loss_fn": square,
        "stages": stages,
        **options,
    }
    far = 0.0
    options = {"example": tuple(each[:2].clone() for each in inputs), **options}
    with penstock.Pipeline(model, **options) as pipe:
        for _ in range(steps):
            expected = torch.zeros(())
            for number in range(2):
                loss = square(plain(*(each[2 * number : 2 * number + 2].clone() for each in inputs))) / 2
                loss.backward()
                expected = expected + loss.detach()
            far = max(far, (expected - pipe.step(*inputs).loss).abs().item())
            found = dict(pipe.named_parameters())
            assert set(found) == {name for name, _ in plain.named_parameters()}
            for name, parameter in plain.named_parameters():
                gradient = found[name].grad
                assert (parameter.grad is None) == (gradient is None), name
                if parameter.grad is not None and gradient is not None:
                    far = max(far, (parameter.grad - gradient).abs().max().item())
        state = pipe.state_dict()
        assert set(state) == set(plain.state_dict())
        for name, buffer in plain.named_buffers():
            assert torch.equal(state[name], buffer), name
    return far
