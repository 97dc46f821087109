"""GPipe trains: forward, backward and what else autograd offers, bit for bit as the plain model on microbatches."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from compat.gpipe.plain import assert_same_gradients, chunked, layers, rows
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import RunError

CHECKPOINTS = ["never", "except_last", "always"]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize(("chunks", "count"), [(1, 4), (4, 8), (4, 9), (8, 3), (3, 1)])
def test_two_steps_are_those_of_the_plain_model(checkpoint: str, chunks: int, count: int) -> None:
    plain, pipe = layers(), penstock.GPipe(layers(), balance=[2, 1, 3], chunks=chunks, checkpoint=checkpoint)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (plain, pipe)]
    for step in range(2):
        x, other = rows(count, requires_grad=True), rows(count, requires_grad=True)
        target = rows(count) + step
        wanted = chunked(plain, other, min(chunks, count))
        found = pipe(x)
        assert torch.equal(found, wanted)
        F.mse_loss(wanted, target).backward()
        F.mse_loss(found, target).backward()
        assert_same_gradients(pipe, plain)
        assert x.grad is not None
        assert other.grad is not None
        assert torch.equal(x.grad, other.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_gradients_add_up_over_backwards_as_ever() -> None:
    plain, pipe, x = layers(), penstock.GPipe(layers(), balance=3, chunks=4), rows()
    for _ in range(2):
        chunked(plain, x, 4).sum().backward()
        pipe(x).sum().backward()
    assert_same_gradients(pipe, plain)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_two_calls_and_one_backward(checkpoint: str) -> None:
    plain, pipe, x = layers(), penstock.GPipe(layers(), balance=2, chunks=4, checkpoint=checkpoint), rows()
    (pipe(x).sum() * pipe(2 * x).sum() + pipe(pipe(x)).sum()).backward()
    (chunked(plain, x, 4).sum() * chunked(plain, 2 * x, 4).sum() + plain(plain(x)).sum()).backward()
    for have, want in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(have.grad, want.grad)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_graph_that_is_retained_can_be_gone_through_again(checkpoint: str) -> None:
    pipe, x = penstock.GPipe(layers(), balance=2, chunks=4, checkpoint=checkpoint), rows()
    y = pipe(x).sum()
    y.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
    y.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(pipe.parameters(), once, strict=True) if p.grad is not None)
    with pytest.raises(RuntimeError, match=r"second time|already"):
        y.backward()


def test_a_backward_whose_graph_is_gone_is_refused_by_penstock_too() -> None:
    y = penstock.GPipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), balance=2, chunks=2)(rows())
    y.backward(torch.ones_like(y))
    with pytest.raises(RunError, match="retain_graph=True"):
        y.backward(torch.ones_like(y))


def test_autograd_grad_gives_gradients_and_leaves_none_behind() -> None:
    plain, pipe, x = layers(), penstock.GPipe(layers(), balance=3, chunks=4), rows(requires_grad=True)
    found = torch.autograd.grad(pipe(x).pow(2).sum(), [x, *pipe.parameters()])
    wanted = torch.autograd.grad(chunked(plain, x, 4).pow(2).sum(), [x, *plain.parameters()])
    assert all(map(torch.equal, found, wanted))
    assert all(parameter.grad is None for parameter in (x, *pipe.parameters()))


def test_hooks_of_a_parameter_see_the_whole_gradient_once() -> None:
    plain, pipe, x = layers(), penstock.GPipe(layers(), balance=3, chunks=4), rows()
    fired: Counter[str] = Counter()

    def double(gradient: Tensor) -> Tensor:
        fired["hook"] += 1
        return 2 * gradient

    pipe[0].weight.register_hook(double)
    pipe[2].weight.register_post_accumulate_grad_hook(lambda _: fired.update(["after"]))
    for _ in range(2):
        pipe.zero_grad()
        pipe(x).sum().backward()
    chunked(plain, x, 4).sum().backward()
    assert fired == {"hook": 2, "after": 2}
    assert torch.equal(pipe[0].weight.grad, 2 * plain[0].weight.grad)
    assert torch.equal(pipe[2].weight.grad, plain[2].weight.grad)


def test_gradients_of_gradients_are_refused_and_not_wrong() -> None:
    pipe, x = penstock.GPipe(layers(), balance=2, chunks=2), rows(requires_grad=True)
    (first,) = torch.autograd.grad(pipe(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


class Meeting(torch.autograd.Function):
    """Goes on when two stages are in it at a time, with the microbatches that a pipeline would have there."""

    barrier: threading.Barrier

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Meeting.barrier.wait(30)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Meeting.barrier.wait(30)
        return gradient


class Meets(nn.Module):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.alone = first  # the microbatch that this stage computes while the other has none

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        return x if not META["on"] or penstock.current_microbatch() == self.alone else Meeting.apply(x)


META = {"on": False}


def test_forward_and_backward_both_overlap() -> None:
    """Stage 0 in microbatch 1 waits for stage 1 in microbatch 0, in the forward, and the mirror in the backward.

    One after the other, neither would ever get out.
    """
    Meeting.barrier = threading.Barrier(2)
    pipe = penstock.GPipe(nn.Sequential(Meets(0), Meets(2)), balance=[1, 1], chunks=3, checkpoint="never")
    META["on"] = False
    pipe(rows(3))  # a stage's first forward is alone, to see whether it draws
    META["on"] = True
    try:
        y = pipe(rows(3))
        Meeting.barrier.reset()
        y.sum().backward()
    finally:
        META["on"] = False
    assert not Meeting.barrier.broken


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_dropout_follows_manual_seed_and_is_the_same_when_recomputed(checkpoint: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    found = []
    for way in ("never", checkpoint):
        pipe, x = penstock.GPipe(model, balance=2, chunks=4, checkpoint=way), rows()
        torch.manual_seed(3)
        first, second = pipe(x), pipe(x)
        assert not torch.equal(first, second)
        torch.manual_seed(3)
        assert torch.equal(first, pipe(x))
        first.pow(2).sum().backward()
        found.append([first, *(parameter.grad for parameter in pipe.parameters())])
        pipe.zero_grad()
    assert all(map(torch.equal, *found))


def test_a_layer_that_is_set_to_draw_draws_from_then_on() -> None:
    dropout = nn.Dropout(0.0)
    pipe = penstock.GPipe(nn.Sequential(nn.Linear(8, 8), dropout, nn.Linear(8, 8)), balance=[2, 1], chunks=4)
    pipe(rows())
    dropout.p = 0.5
    torch.manual_seed(1)
    first = pipe(rows())
    torch.manual_seed(1)
    assert torch.equal(first, pipe(rows()))


def test_a_model_that_draws_nothing_leaves_the_generator_alone() -> None:
    pipe = penstock.GPipe(layers(), balance=2, chunks=4)
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    pipe(rows()).sum().backward()
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_mode_that_changes_before_the_backward_does_not_change_it(checkpoint: str) -> None:
    """torch's own checkpoint would recompute without dropout."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), rows()
    found = []
    for switches in (False, True):
        pipe = penstock.GPipe(model, balance=[1, 2], chunks=4, checkpoint=checkpoint).train()
        torch.manual_seed(3)
        y = pipe(x).pow(2).sum()
        if switches:
            pipe.eval()
        y.backward()
        assert pipe.training is not switches
        assert model[1].training is not switches
        found.append([parameter.grad for parameter in pipe.parameters()])
        pipe.zero_grad()
    assert all(map(torch.equal, *found))


def test_weights_that_change_before_the_backward_are_refused() -> None:
    for checkpoint in CHECKPOINTS:
        pipe = penstock.GPipe(layers(), balance=2, chunks=4, checkpoint=checkpoint)
        y = pipe(rows()).sum()
        with torch.no_grad():
            pipe[2].weight.add_(1)
        with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
            y.backward()


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_parameters_for_one_call(checkpoint: str) -> None:
    """functional_call puts other tensors into the layers, here ones with a graph behind them, and takes them out."""
    scale = torch.full((), 2.0, requires_grad=True)
    pipe, plain, x = penstock.GPipe(layers(), balance=3, chunks=4, checkpoint=checkpoint), layers(), rows()
    found = []
    for model in (pipe, plain):
        scale.grad = None
        others = {name: parameter.detach() * scale for name, parameter in model.named_parameters()}
        y = torch.func.functional_call(model, others, (x,))
        if model is pipe and checkpoint != "never":
            with pytest.raises(RunError, match="replaced between the forward and its backward"):
                y.sum().backward()
            return
        y.sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        found.append(scale.grad)
    torch.testing.assert_close(*found)


def test_a_gradient_that_is_no_number_is_found_where_it_arises() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(x - x)

    pipe = penstock.GPipe(nn.Sequential(nn.Linear(8, 8), Root()), balance=[1, 1], chunks=2, checkpoint="never")
    with torch.autograd.set_detect_anomaly(True), pytest.warns(UserWarning, match="Error detected"):  # noqa: SIM117
        with pytest.raises(RuntimeError, match="nan") as caught:
            (pipe(rows()) * 0).sum().backward()
    assert "stage 1 of 2, backward" in caught.value.__notes__[0]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_autocast_around_the_forward_holds_for_what_is_recomputed(checkpoint: str) -> None:
    plain, pipe, x = layers(), penstock.GPipe(layers(), balance=3, chunks=4, checkpoint=checkpoint), rows()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, wanted = pipe(x), chunked(plain, x, 4)
    assert y.dtype is wanted.dtype is torch.bfloat16
    y.float().pow(2).sum().backward()
    wanted.float().pow(2).sum().backward()
    for have, want in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(have.grad, want.grad, rtol=2e-2, atol=2e-2)


def test_layers_can_ask_what_they_are_in() -> None:
    seen: list[tuple[int | None, bool, bool]] = []

    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((penstock.current_microbatch(), penstock.is_checkpointing(), penstock.is_recomputing()))
            return super().forward(x)

    asks = Asks(8, 8)
    pipe = penstock.GPipe(nn.Sequential(asks, nn.Linear(8, 8)), balance=[1, 1], chunks=3)
    y = pipe(rows())
    assert seen == [(0, True, False), (1, True, False), (2, False, False)]
    seen.clear()
    y.sum().backward()
    assert seen == [(1, False, True), (0, False, True)]
    seen.clear()
    asks(rows())
    with torch.no_grad():
        pipe(rows(2))
    assert seen == [(None, False, False), (0, False, False), (1, False, False)]
