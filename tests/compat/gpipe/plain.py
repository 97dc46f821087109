"""What a GPipe is compared with: the same model on the same microbatches, in one plain graph of autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def layers(count: int = 3, width: int = 8) -> nn.Sequential:
    """Linear layers and activations, with the same numbers every time."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(count) for layer in (nn.Linear(width, width), nn.Tanh())])


def rows(count: int = 8, width: int = 8, **options: Any) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1), **options)


def chunked(model: nn.Module, x: Tensor, chunks: int) -> Tensor:
    """The plain model on each microbatch. Autograd goes back through the last of them first, as GPipe does."""
    return torch.cat([model(piece) for piece in x.tensor_split(chunks)])


def assert_gradients_of_its_module(pipe: Any) -> None:
    """A GPipe that holds a module twice: its gradients, close to those of the module that it wraps."""
    pipe(rows()).sum().backward()
    have = [parameter.grad for parameter in pipe.parameters()]
    pipe.zero_grad()
    pipe.module(rows()).sum().backward()
    for one, other in zip(have, [parameter.grad for parameter in pipe.parameters()], strict=True):
        torch.testing.assert_close(one, other)


def assert_same_gradients(pipe: nn.Module, plain: nn.Module) -> None:
    """Bit for bit, by name; None where there is none."""
    found, wanted = (dict(model.named_parameters()) for model in (pipe, plain))
    assert list(found) == list(wanted)
    for name in wanted:
        have, want = found[name].grad, wanted[name].grad
        assert (have is None) == (want is None), name
        assert have is None or want is None or torch.equal(have, want), name
