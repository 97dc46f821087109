"""The split backward beside what torch does around modules: DDP, checkpoints, hooks, autocast, functorch, compile."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from runtime.backward.comparing import MICROBATCHES, Apply, Block, assert_same, backward_input, check, mlp, normal
from torch import Tensor, distributed, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from penstock.runtime.backward.deferring_mode import DeferrableParameters, DeferringMode


def test_hooks_of_modules_and_of_tensors() -> None:
    def hooked() -> nn.Module:
        model = mlp(6)
        model[0].register_forward_hook(lambda _m, _i, output: output * 2)
        model[2].register_forward_pre_hook(lambda _m, inputs: (inputs[0] + 1,))
        model[2].register_full_backward_hook(lambda _m, gradients, _o: (gradients[0] * 3,))
        model[0].register_full_backward_pre_hook(lambda _m, gradients: (gradients[0] * 0.5,))
        return model

    assert check(hooked(), normal(4, 6)) == 2

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        y.register_hook(lambda gradient: gradient * 2)  # the weight's gradient must see it too
        return y.relu()

    assert check(Apply(forward, layer=nn.Linear(6, 6)), normal(4, 6)) == 1


def test_a_hook_that_changes_a_parameters_gradient() -> None:
    plain, parameters = nn.Linear(6, 6), DeferrableParameters()
    split = copy.deepcopy(plain)
    for layer in (plain, split):
        layer.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    for _ in range(MICROBATCHES):
        x, recording = torch.randn(4, 6), DeferringMode(parameters)
        with recording:
            y = split(x.requires_grad_())
        backward_input([y], [torch.ones_like(y)], recording)
        recording.deferred.run()
        plain(x).sum().backward()
    assert_same(split.weight.grad, plain.weight.grad, "weight")


def reduce_by_ddp() -> None:
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)))
    reduced: list[int] = []

    def reduce(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and not those of strings
        reduced.append(bucket.buffer().numel())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() / 2)
        return future

    wrapped.register_comm_hook(None, reduce)
    parameters = DeferrableParameters()
    for microbatch in range(4):
        recording = DeferringMode(parameters)
        with nullcontext() if microbatch % 2 else wrapped.no_sync(), recording:
            y = wrapped(torch.randn(4, 6, requires_grad=True))
        backward_input([y], [torch.ones_like(y)], recording)
        recording.deferred.run()
        assert sum(reduced) == (microbatch + 1) // 2 * sum(p.numel() for p in wrapped.parameters())


def test_ddp_reduces_every_gradient_once_a_synchronised_microbatch() -> None:
    """torch's split writes `.grad` past DDP's hooks, so replicas drift apart in silence."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        reduce_by_ddp()
    finally:
        gc.collect()  # a group that DDP outlives ends with it, and may then wait for its own threads for ever
        distributed.destroy_process_group()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_recomputed_once(reentrant: bool) -> None:
    """torch's split recomputes once per parameter group: 18 runs of a layer instead of 2."""
    runs: Counter[int] = Counter()

    class Counted(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index, self.layer = index, nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            runs[self.index] += 1
            return self.layer(x).relu()

    layers = nn.Sequential(*[Counted(i) for i in range(4)])
    module = Apply(
        lambda m, x: m.last(checkpoint(m.layers, x, use_reentrant=reentrant)), layers=layers, last=nn.Linear(6, 6)
    )
    assert check(module, normal(4, 6)) == 1
    assert set(runs.values()) == {2 * 2 * MICROBATCHES}  # forward and recomputation, plain and split


def test_saved_tensors_hooks_still_get_what_is_saved() -> None:
    packed: list[int] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x.numel())
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks
    assert check(nn.Linear(6, 6), normal(4, 6), context=lambda: hooks(pack, lambda x: x)) == 0
    assert len(packed) == 2 * 2 * MICROBATCHES  # input and weight


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    def cast() -> Any:
        return torch.autocast("cpu", dtype)

    assert check(mlp(16), normal(8, 16), context=cast) == 2
    assert check(mlp(16, bias=False), normal(2, 8, 16), context=cast) == 2
    assert check(mlp(16), normal(8, 16), context=cast, input_needs_gradient=False) == 2
    assert check(Block(), normal(2, 16, 32), context=cast) == 4
    assert check(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)), normal(2, 3, 9, 9), context=cast) == 2
    assert check(Apply(lambda m, x: m.layer(m.layer(x)), layer=nn.Linear(16, 16)), normal(8, 16), context=cast) == 2

    def mixed(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = m.layer(x)
        return m.other(y)

    assert check(Apply(mixed, layer=nn.Linear(16, 16), other=nn.Linear(16, 16)), normal(8, 16), context=cast) == 2


def test_functorch_inside_a_forward() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.vmap(m.layer)(x) + m.other(x)

    assert check(Apply(forward, layer=nn.Linear(6, 6), other=nn.Linear(6, 6)), normal(4, 6)) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_compiled_submodules_run_as_they_are() -> None:
    torch._dynamo.reset()
    graphs = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    plain, outer, parameters = mlp(6), nn.Linear(6, 6), DeferrableParameters()
    split, twin = copy.deepcopy(plain), copy.deepcopy(outer)
    compiled = torch.compile(split, backend=compiler)
    for microbatch in range(MICROBATCHES):
        x, recording = torch.randn(4, 6), DeferringMode(parameters)
        with recording:
            y = compiled(outer(x.clone().requires_grad_()))
        backward_input([y], [torch.ones_like(y)], recording)
        assert recording.deferred.pending == min(microbatch, 1)  # the layer outside
        recording.deferred.run()
        plain(twin(x)).sum().backward()
    assert len(graphs) == 1, "the mode must not break what is compiled into pieces"
    got, wanted = nn.Sequential(split, outer), nn.Sequential(plain, twin)
    for a, b in zip(got.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
