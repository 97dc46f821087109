"""A stage's backward as plain autograd and as I + W, side by side."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.runtime.backward.deferring_mode import DeferrableParameters, DeferringMode

MICROBATCHES = 3


def backward_full(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """B: gradients of inputs and weights. An output without gradient, or that needs none, takes no part."""
    roots = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
    if roots:
        torch.autograd.backward([o for o, _ in roots], [g for _, g in roots])


def backward_input(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], recording: DeferringMode) -> None:
    """I: gradients of the inputs, left as `.grad` on the received leaves, and of all weights that were not deferred."""
    recording.learn(outputs)
    recording.deferred.begin_input()
    backward_full(outputs, gradients)


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def bits(tensor: Tensor) -> list[Any]:
    """Equal bits, not only equal numbers: -0.0 is not 0.0."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return [tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(width).tolist()]


def assert_same(got: Tensor | None, wanted: Tensor | None, what: str, *, exact: bool = True) -> None:
    if got is None or wanted is None:
        assert got is wanted, f"{what}: {got} against {wanted}"
    elif got.is_sparse or wanted.is_sparse:
        assert torch.equal(got.to_dense(), wanted.to_dense()), what
    elif exact:
        assert bits(got) == bits(wanted), f"{what} differs by up to {(got - wanted).abs().max()}"
    else:
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12, msg=what)


def count_hooks(module: nn.Module) -> Counter[str]:
    fired: Counter[str] = Counter()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda _, name=name: fired.update([f"tensor {name}"]))
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([f"post {name}"]))
    return fired


def check(
    module: nn.Module,
    inputs: Callable[[], Sequence[Tensor]],
    *,
    gradient: Callable[[Tensor], Tensor | None] = torch.randn_like,
    context: Callable[[], Any] = nullcontext,
    exact: bool = True,
    microbatches: int = MICROBATCHES,
    input_needs_gradient: bool = True,
) -> int:
    """Run `module` plain and split; everything must agree. Returns how many operations waited in the last one."""
    plain, split = copy.deepcopy(module), copy.deepcopy(module)  # neither with gradients of an earlier check
    plain_hooks, split_hooks = count_hooks(plain), count_hooks(split)
    parameters = DeferrableParameters()
    pending = 0
    for microbatch in range(microbatches):
        given = list(inputs())
        leaves = []
        for _ in range(2):
            own = [x.detach().clone(memory_format=torch.preserve_format) for x in given]
            leaves.append([x.requires_grad_(input_needs_gradient and x.is_floating_point()) for x in own])
        seed = int(torch.randint(2**31, ()))
        torch.manual_seed(seed)
        with context():
            wanted = as_tuple(plain(*leaves[0]))
        torch.manual_seed(seed)
        recording = DeferringMode(parameters)
        with nullcontext() if parameters.differentiates else recording, context():
            got = as_tuple(split(*leaves[1]))
        gradients = [gradient(y) if y.is_floating_point() else None for y in wanted]
        backward_full(wanted, gradients)
        backward_input(got, gradients, recording)
        pending = recording.deferred.pending
        recording.deferred.run()
        assert recording.deferred.pending == 0
        for a, b in zip(got, wanted, strict=True):
            assert_same(a.detach(), b.detach(), f"output of microbatch {microbatch}", exact=exact)
        for a, b in zip(leaves[1], leaves[0], strict=True):
            assert_same(a.grad, b.grad, f"input gradient of microbatch {microbatch}", exact=exact)
        wanted_grads = dict(plain.named_parameters())
        for name, parameter in split.named_parameters():
            assert_same(parameter.grad, wanted_grads[name].grad, f"{name} of {microbatch}", exact=exact)
        assert split_hooks == plain_hooks, f"hooks after microbatch {microbatch}"
    return pending


class Apply(nn.Module):
    """A module from a function of the module and its inputs."""

    def __init__(self, function: Callable[..., Any], **children: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randn(*shape, dtype=dtype)]


def mlp(width: int = 8, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width, **options), nn.GELU(), nn.Linear(width, width, **options))


class Block(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.mlp(self.second(x))
