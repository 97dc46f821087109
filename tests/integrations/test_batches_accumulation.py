"""Steps that add up to one batch: how many microbatches the last, smaller one has."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.integrations.batches import AccumulationScale, take_count


def test_a_small_batch_takes_fewer_microbatches_and_its_loss_is_scaled() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).double()
    pipe = penstock.Pipeline(model, stages=2, microbatches=4, loss_fn=F.mse_loss)
    pipe.state.scaler = scale = AccumulationScale()
    scale.scale = 0.5
    for rows in (8, 3):
        x, y = torch.randn(rows, 3, dtype=torch.float64), torch.randn(rows, 1, dtype=torch.float64)
        assert take_count(pipe, 4, (x,), target=y) == min(rows, 4)
        pipe.zero_grad()
        result = pipe.step(x, target=y)
        assert len(result.losses) == min(rows, 4)
        have = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        wanted = torch.autograd.grad(F.mse_loss(model(x), y) / 2, list(model.parameters()))
        torch.testing.assert_close(have, list(wanted))
    pipe.close()
