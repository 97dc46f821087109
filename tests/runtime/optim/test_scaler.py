"""Loss scaling on one process; that all ranks agree on it is in `test_precision`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime.optim.half_blocks import WIDTH, batch, piped
from torch import Tensor, nn

import penstock
from penstock.errors import UsageError


def test_scaled_gradients_are_neither_clipped_nor_mixed_with_unscaled_ones() -> None:
    with piped(precision="fp16") as pipe:
        x, y = batch()
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        scaler = penstock.GradScaler(pipe, init_scale=8.0)
        with pytest.raises(UsageError, match="no rank has a gradient to unscale"):
            scaler.unscale_(optimizer)
        pipe.step(x, target=y)
        with pytest.raises(UsageError, match=r"clip_grad_norm_\(\) on gradients that are scaled by 8; call scaler.uns"):
            pipe.clip_grad_norm_(1.0)
        with pytest.raises(UsageError, match=r"clip_grad_value_\(\) on gradients that are scaled by 8"):
            pipe.clip_grad_value_(1.0)
        with pytest.raises(UsageError, match=r"pipe.step\(\) scales the loss"):
            scaler.scale(torch.ones(()))
        pipe.step(x, target=y)  # steps may add up under one scale
        scaler.unscale_(optimizer)
        with pytest.raises(UsageError, match="are unscaled already, and this step's would be added"):
            pipe.step(x, target=y)
        assert pipe.evaluate(x, target=y).loss is not None
        pipe.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        pipe.step(x, target=y)
        other = penstock.GradScaler(pipe)
        with pytest.raises(UsageError, match="another GradScaler by now"):
            scaler.step(optimizer)
        assert other.get_scale() == 2.0**16


def test_a_scaler_that_is_off_changes_nothing() -> None:
    with piped() as pipe, piped() as other:
        x, y = batch()
        scaler = penstock.GradScaler(pipe, enabled=False)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(x, target=y)
        other.step(x, target=y)
        pipe.clip_grad_norm_(1e9)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(pipe.parameters(), other.parameters(), strict=True))  # type: ignore[arg-type]
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(
    "options", [{"init_scale": 0.0}, {"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}]
)
def test_a_scaler_that_could_not_work_is_refused(options: dict[str, float]) -> None:
    with piped() as pipe, pytest.raises(UsageError, match=f"{next(iter(options))}="):
        penstock.GradScaler(pipe, **options)  # type: ignore[arg-type]


def test_weights_that_are_float16_themselves_are_refused_unless_they_are_frozen() -> None:
    """torch said "Attempting to unscale FP16 gradients", after the first step's whole backward."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half().requires_grad_(False))
    with penstock.Pipeline(model, stages=2, microbatches=1, loss_fn=nn.functional.mse_loss) as pipe:
        penstock.GradScaler(pipe)
        model[1].requires_grad_(True)
        with pytest.raises(UsageError, match=r"1.weight has dtype float16, .*; keep the weights in float32"):
            penstock.GradScaler(pipe)
        penstock.GradScaler(pipe, enabled=False)


def test_extra_losses_are_scaled_with_the_loss() -> None:
    class Balanced(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            out = super().forward(input)
            penstock.add_loss("balance", out.pow(2).mean())
            return out

    def gradients(scale: float) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        with piped([Balanced(WIDTH, WIDTH), Balanced(WIDTH, WIDTH)], precision=None) as pipe:
            scaler = penstock.GradScaler(pipe, init_scale=scale)
            result = pipe.step(batch()[0], target=batch()[1])
            scaler.unscale_(torch.optim.SGD(pipe.parameters(), lr=0.1))
            return [p.grad for p in pipe.parameters()], result.extra_losses  # type: ignore[misc]

    (one, losses), (other, same) = gradients(1.0), gradients(2.0**10)
    assert losses == same
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
