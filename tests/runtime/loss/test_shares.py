"""Each microbatch's share of the batch's loss: by rows, by weight, and none where nothing counts."""

from __future__ import annotations

import pytest
import torch
from runtime.loss.whole_loss import close, gradients, stages, whole
from torch import Tensor
from torch.nn import functional as F

import penstock
from penstock.errors import ModelError, UsageError

IGNORED = -100


@pytest.mark.parametrize("rows", [9, 7, 3])
def test_a_mean_over_ragged_microbatches_is_the_mean_over_the_batch(rows: int) -> None:
    pipe = penstock.Pipeline(stages(), microbatches=3, loss_fn=F.mse_loss)
    x, y = torch.randn(rows, 6).double(), torch.randn(rows, 6).double()
    result = pipe.step(x, target=y)
    found = gradients(pipe)
    close((result.loss, found), whole(pipe, lambda model: F.mse_loss(model(x), y)))


def test_a_sum_is_the_sum_of_the_batch() -> None:
    def total(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target, reduction="sum")

    pipe = penstock.Pipeline(
        stages(), microbatches=3, loss_fn=total, loss_options=penstock.LossOptions(reduction="sum")
    )
    x, y = torch.randn(7, 6).double(), torch.randn(7, 6).double()
    result = pipe.step(x, target=y)
    found = gradients(pipe)
    close((result.loss, found), whole(pipe, lambda model: total(model(x), y)))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_loss_with_ignored_tokens_is_that_of_the_batch_if_the_weight_is_given(schedule: str) -> None:
    pipe = penstock.Pipeline(
        stages(last=5),
        microbatches=3,
        schedule=schedule,
        loss_fn=F.cross_entropy,
        loss_options=penstock.LossOptions(weight=lambda target: (target != IGNORED).sum()),
    )
    x, y = torch.randn(9, 6).double(), torch.randint(5, (9,))
    y[:2] = IGNORED
    y[3] = IGNORED
    y[6:8] = IGNORED
    result = pipe.step(x, target=y)
    found = gradients(pipe)
    close((result.loss, found), whole(pipe, lambda model: F.cross_entropy(model(x), y)))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_microbatch_that_weighs_nothing_adds_nothing_although_its_own_mean_is_nan(schedule: str) -> None:
    def mean_of_valid(output: Tensor, y: Tensor) -> Tensor:
        valid = (y != IGNORED).to(output.dtype)
        return (F.cross_entropy(output, y, reduction="none") * valid).sum() / valid.sum()

    pipe = penstock.Pipeline(
        stages(last=5),
        microbatches=3,
        schedule=schedule,
        loss_fn=mean_of_valid,
        loss_options=penstock.LossOptions(weight=lambda y: (y != IGNORED).sum()),
    )
    x, y = torch.randn(6, 6).double(), torch.tensor([1, 2, IGNORED, IGNORED, 0, IGNORED])
    result = pipe.step(x, target=y)
    found = gradients(pipe)
    assert result.losses[1].isnan()
    close((result.loss, found), whole(pipe, lambda model: mean_of_valid(model(x), y)))


def test_a_batch_without_weight_has_no_mean() -> None:
    pipe = penstock.Pipeline(
        stages(), microbatches=2, loss_fn=F.mse_loss, loss_options=penstock.LossOptions(weight=lambda target: 0)
    )
    with pytest.raises(ModelError, match=r"the microbatches weigh 0\.0 in all"):
        pipe.step(torch.randn(4, 6).double(), target=torch.randn(4, 6).double())
    with pytest.raises(UsageError, match="was passed no target, but loss_fn mse_loss needs one"):
        pipe.step(torch.randn(4, 6).double())
    with pytest.raises(UsageError, match=r"weight=\) reads .target., but step\(\) got neither that nor a target"):
        penstock.Pipeline(stages(), microbatches=2, loss_options=penstock.LossOptions(weight=lambda target: 0)).step(
            torch.randn(4, 6).double()
        )
