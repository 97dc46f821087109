"""The split backward against the plain one: the same bits, the same hooks, nothing done twice, nothing kept.

Each model runs as plain autograd and as I + W, several microbatches without zeroing, so that gradients accumulate. The
first microbatch of a stage only shows which parameters can wait; from the second on they do.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runtime.backward.comparing import Apply, Block, backward_input, check, mlp, normal
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.errors import RunError
from penstock.runtime.backward import deferred_weights as backward_module
from penstock.runtime.backward.deferring_mode import DeferrableParameters, DeferringMode


def test_a_transformer_block_defers_its_four_products() -> None:
    assert check(Block(), normal(2, 16, 32)) == 4


def test_outputs_that_are_views() -> None:
    """torch's split detaches its outputs in place, which a view refuses."""
    for view in (
        lambda y: y.view(2, -1), lambda y: y.transpose(0, 1), lambda y: y.unsqueeze(0), lambda y: y[1:],
        lambda y: y.chunk(2),
    ):  # fmt: skip
        assert check(Apply(lambda m, x, view=view: view(m.layer(x)), layer=nn.Linear(6, 6)), normal(4, 6)) == 1


def test_a_parameter_that_the_input_does_not_reach() -> None:
    """torch's split loses its gradient."""
    module = Apply(lambda m, x: (m.layer(x), m.query * 2), layer=nn.Linear(6, 6), query=nn.Parameter(torch.ones(3)))
    assert check(module, normal(4, 6)) == 1
    through = Apply(
        lambda m, x: (m.layer(x), m.layer(m.query)), layer=nn.Linear(6, 6), query=nn.Parameter(torch.ones(3, 6))
    )
    assert check(through, normal(4, 6)) == 2


def test_outputs_without_gradient_without_need_of_one_and_twice_the_same() -> None:
    def both(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = m.layer(x)
        return y, y, y.detach(), (y > 0), m.other(x)

    module = Apply(both, layer=nn.Linear(6, 6), other=nn.Linear(6, 5))
    assert check(module, normal(4, 6), gradient=lambda y: torch.randn_like(y) if y.shape[-1] == 6 else None) == 1


def test_no_gradient_at_all_leaves_the_parameters_alone() -> None:
    layer, recording = nn.Linear(6, 6), DeferringMode(DeferrableParameters())
    with recording:
        y = layer(torch.randn(4, 6))
    backward_input([y], [None], recording)
    recording.deferred.run()
    assert layer.weight.grad is None


def test_an_input_handed_through() -> None:
    assert check(Apply(lambda m, x: (m.layer(x), x), layer=nn.Linear(6, 6)), normal(4, 6)) == 1


def test_a_first_stage_whose_input_needs_no_gradient() -> None:
    assert check(mlp(), normal(4, 8), input_needs_gradient=False) == 2
    assert check(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), normal(4, 8), input_needs_gradient=False) == 1
    assert check(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), normal(2, 3, 8, 8), input_needs_gradient=False) == 1


def test_frozen_parameters() -> None:
    frozen = mlp()
    frozen[0].requires_grad_(False)
    assert check(frozen, normal(4, 8)) == 1
    assert check(copy.deepcopy(frozen), normal(4, 8), input_needs_gradient=False) == 1
    frozen[2].requires_grad_(False)
    assert check(copy.deepcopy(frozen), normal(4, 8)) == 0
    for name, waiting in (("weight", 0), ("bias", 1)):
        layer = nn.Linear(8, 8)
        getattr(layer, name).requires_grad_(False)
        assert check(layer, normal(4, 8)) == waiting
        assert check(copy.deepcopy(layer), normal(4, 8), input_needs_gradient=False) == waiting


def test_freezing_between_microbatches_is_followed() -> None:
    layer, parameters = nn.Linear(6, 6), DeferrableParameters()
    for microbatch in range(3):
        recording = DeferringMode(parameters)
        x = torch.randn(4, 6, requires_grad=True)
        layer.weight.grad = None
        layer.weight.requires_grad_(microbatch < 2)
        with recording:
            y = layer(x)
        backward_input([y], [torch.ones_like(y)], recording)
        recording.deferred.run()
        assert (layer.weight.grad is not None) == (microbatch < 2)


def test_a_layer_called_twice() -> None:
    assert check(Apply(lambda m, x: m.layer(m.layer(x).relu()), layer=nn.Linear(6, 6)), normal(4, 6)) == 2
    thrice = Apply(lambda m, x: m.layer(m.layer(m.layer(x))), layer=nn.Linear(6, 6))
    assert check(thrice, normal(2, 4, 6)) == 3


def tokens() -> list[Tensor]:
    return [torch.randint(0, 11, (2, 5))]


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_parameter_with_a_use_that_cannot_wait_does_not_wait_at_all(order: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if order == "before":
            x = x * m.layer.weight.sum()
        x = m.other(m.layer(x))
        return x if order == "before" else x * m.layer.weight.sum()

    assert check(Apply(forward, layer=nn.Linear(6, 6), other=nn.Linear(6, 6)), normal(4, 6)) == 1  # other


def test_a_parameter_that_is_also_an_output() -> None:
    module = Apply(lambda m, x: (m.other(m.layer(x)), m.layer.weight), layer=nn.Linear(6, 6), other=nn.Linear(6, 6))
    assert check(module, normal(4, 6)) == 1


class Scale(torch.autograd.Function):
    """A user's own operation, which no mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.variable = None  # a name that autograd's own leaves have
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradients[0] * scale, (gradients[0] * x).sum(0)


def test_a_users_own_function() -> None:
    module = Apply(
        lambda m, x: m.layer(Scale.apply(x, m.scale)), layer=nn.Linear(6, 6), scale=nn.Parameter(torch.randn(6))
    )
    assert check(module, normal(4, 6)) == 1
    tied = Apply(lambda m, x: Scale.apply(m.layer(x), m.layer.bias), layer=nn.Linear(6, 6))
    assert check(tied, normal(4, 6)) == 1  # the weight; the bias has a use that cannot wait
    behind = Apply(
        lambda m, x: Scale.apply(m.layer(x * m.layer.weight.sum()), m.scale),
        layer=nn.Linear(6, 6),
        scale=nn.Parameter(torch.randn(6)),
    )
    assert check(behind, normal(4, 6)) == 0


def test_microbatches_that_take_different_paths_before_the_first_backward() -> None:
    layer, parameters = nn.Linear(6, 6), DeferrableParameters()
    flight = []
    for regularized in (True, False):
        recording = DeferringMode(parameters)
        with recording:
            y = layer(torch.randn(4, 6, requires_grad=True))
            y = y + layer.weight.sum() if regularized else y
        flight.append((y, recording))
    for y, recording in flight:
        recording.learn([y])
    assert parameters.deferrable[id(layer.weight)][1] is False
    assert parameters.deferrable[id(layer.bias)][1] is True


def test_parametrized_and_functionally_called_modules() -> None:
    assert check(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), normal(4, 6)) == 0

    def swapped(m: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(m.layer, {"weight": m.other}, (x,))

    module = Apply(swapped, layer=nn.Linear(6, 6), other=nn.Parameter(torch.randn(6, 6)))
    assert check(module, normal(4, 6)) == 1
    scaled = Apply(lambda m, x: F.linear(x, m.layer.weight * 2, m.layer.bias), layer=nn.Linear(6, 6))
    assert check(scaled, normal(4, 6)) == 0


def test_tensors_used_twice_and_in_place_operations() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        z = y * 2 + m.other(y) + m.other(x)
        w = m.layer(z)
        w += x
        return F.relu_(w)

    assert check(Apply(forward, layer=nn.Linear(6, 6), other=nn.Linear(6, 6)), normal(4, 6)) == 4


def test_changing_an_input_in_place_is_an_error_as_ever() -> None:
    layer, parameters = nn.Linear(6, 6), DeferrableParameters()
    for attempt in range(2):
        recording = DeferringMode(parameters)
        with recording:
            x = torch.randn(4, 6, requires_grad=True) * 2
            y = layer(x)
            if attempt:
                x.add_(1)
        backward_input([y], [torch.ones_like(y)], recording)
        if attempt:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                recording.deferred.run()
        else:
            recording.deferred.run()


def test_dropout_and_regions_without_gradient() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = m.layer(x)
        return m.layer(F.dropout(x)) - target

    assert check(Apply(forward, layer=nn.Linear(6, 6)), normal(4, 6)) == 1


def test_order_is_enforced() -> None:
    recording = DeferringMode(DeferrableParameters())
    with pytest.raises(RunError, match="after I"):
        recording.deferred.run()
    with recording:
        y = nn.Linear(6, 6)(torch.randn(4, 6))
    with pytest.raises(RunError, match="after I"):
        recording.deferred.run()
    backward_input([y], [torch.ones_like(y)], recording)
    with pytest.raises(RunError, match="runs once"):
        backward_input([y], [torch.ones_like(y)], recording)
    recording.deferred.run()
    with pytest.raises(RunError, match="done"):
        recording.deferred.run()


def test_several_microbatches_in_flight_and_out_of_order() -> None:
    plain, parameters = mlp(), DeferrableParameters()
    split = copy.deepcopy(plain)
    inputs = [torch.randn(4, 8) for _ in range(5)]
    flight = []
    for x in inputs:
        recording = DeferringMode(parameters)
        with recording:
            y = split(x.clone().requires_grad_())
        recording.learn([y])
        flight.append((y, recording))
    for y, recording in reversed(flight):
        backward_input([y], [torch.ones_like(y)], recording)
    assert [recording.deferred.pending for _, recording in flight] == [0, 2, 2, 2, 2]
    for _, recording in flight:
        recording.deferred.run()
    for x in inputs:
        plain(x).sum().backward()
    for got, wanted in zip(split.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


def test_only_what_w_needs_lives_after_i_and_nothing_after_w() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Sigmoid(), nn.Tanh(), nn.Linear(6, 6))
    values: dict[int, StorageWeakRef] = {}
    gradients: dict[int, StorageWeakRef] = {}

    def watch(index: int, output: Tensor) -> None:
        values[index] = StorageWeakRef(output.untyped_storage())
        output.register_hook(lambda g: gradients.update({index: StorageWeakRef(g.untyped_storage())}))

    for index, layer in enumerate(model):
        layer.register_forward_hook(lambda _m, _i, output, index=index: watch(index, output))

    def alive(table: dict[int, StorageWeakRef]) -> list[int]:
        return sorted(index for index, storage in table.items() if not storage.expired())

    parameters = DeferrableParameters()
    gc.disable()  # what is freed must not have waited for the collector
    try:
        for microbatch in range(3):
            recording = DeferringMode(parameters)
            with recording:
                y = model(torch.randn(4, 6, requires_grad=True))
            backward_input([y], [torch.ones_like(y)], recording)
            if microbatch:
                assert alive(values) == [3, 4]  # the second product's input, and y, which we hold
                assert alive(gradients) == [0, 4]  # what arrived at the two products
            recording.deferred.run()
            assert alive(values) == [4]
            assert alive(gradients) == []
            probe = weakref.ref(recording.deferred)
            del y, recording
            assert alive(values) == []
            assert probe() is None
    finally:
        gc.enable()


def test_large_weights_are_accumulated_one_by_one_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_module, "BYTES_PER_PASS", 0)
    assert check(Block(), normal(2, 16, 32)) == 4
    assert (
        check(
            Apply(lambda m, x: m.layer(m.other(m.layer(x))), layer=nn.Linear(6, 6), other=nn.Linear(6, 6)), normal(4, 6)
        )
        == 3
    )
    tied = Apply(
        lambda m, ids: F.linear(m.layer(m.table(ids)), m.table.weight), table=nn.Embedding(11, 6), layer=nn.Linear(6, 6)
    )
    assert check(tied, tokens) == 3


def test_two_ranks_as_threads_at_once() -> None:
    failures: list[BaseException] = []
    barrier = threading.Barrier(2)

    def rank(width: int) -> None:
        try:
            module = mlp(width)
            barrier.wait()
            for _ in range(5):
                assert check(copy.deepcopy(module), normal(4, width), microbatches=4) == 2
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=rank, args=(width,)) for width in (8, 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
