"""What a stage or a loss trains without holding it is found, and said."""

from __future__ import annotations

import re
from typing import Any

import torch
from processes import on_processes
from runtime.loss.learned import M, agrees, attempt, batch, made, plain, trained, with_closure
from torch import Tensor, nn
from torch.nn import functional as F

import penstock


def with_penalty(**options: Any) -> str:
    """An L2 term over all of the model's parameters."""
    (model, _), (x, y) = made(), batch()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + 0.1 * sum(each.square().sum() for each in model.parameters())

    with penstock.Pipeline(model, stages=2, microbatches=M, loss_fn=loss_fn, timeout=30, **options) as pipe:
        return attempt(lambda: pipe.step(x, target=y))


def inner_gradient(output: Tensor, target: Tensor) -> Tensor:
    """A leaf that is made in the forward itself is nobody's to train."""
    probe = output.detach().requires_grad_()
    (slope,) = torch.autograd.grad(F.mse_loss(probe, target), probe, create_graph=True)
    return F.mse_loss(output, target) + slope.square().sum()


def on_ranks() -> dict[str, Any]:
    (model, _), (x, y) = made(), batch()
    with penstock.Pipeline(model, stages=2, microbatches=M, loss_fn=inner_gradient, timeout=30) as pipe:
        pipe.step(x, target=y)
        pipe.step(x, target=y)
    return {
        "trained": trained(),
        "penalty": with_penalty(),
        "parameter": with_closure(nn.Parameter),
        "tensor": with_closure(Tensor),
        "later": with_closure(nn.Parameter, 4 * M),
    }


def test_on_processes_it_is_the_last_ranks_and_others_are_told_of_what_no_stage_holds() -> None:
    first, last = on_processes(2, on_ranks)
    agrees(first["trained"], plain())
    agrees(last["trained"], plain())
    assert "loss_fn.mean" in last["trained"]
    assert "loss_fn.mean" not in first["trained"]
    for found in (first, last):
        told = r"stage 1 or its loss_fn computes with [01]\.(weight|bias), a parameter of rank 0 \(stage 0\)"
        assert re.search(told, found["penalty"])
        assert "weight_decay" in found["penalty"]
    for kind in ("parameter", "tensor", "later"):
        assert first[kind] == ("", [])
        said, warned = last[kind]
        assert said == ""
        assert len(warned) == 1
        assert "trains log_var of shape ()" in warned[0]
        assert "pass loss_fn= as an nn.Module" in warned[0]


def test_in_one_process_a_closure_and_a_penalty_work_as_ever() -> None:
    assert with_penalty() == ""
    assert with_closure(nn.Parameter) == ("", [])
