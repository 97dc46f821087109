"""A loss is asked about each kind of batch once: by shapes, and again when what counts becomes uneven."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime.loss.asked import M, batch, masked, pipeline, refused
from torch import Tensor
from torch.nn import functional as F

from penstock.errors import PeerFailure


def test_an_evaluation_asks_too() -> None:
    x, y, mask = batch()
    with pytest.raises(PeerFailure, match="taken together"):
        pipeline(masked).evaluate(x, target=y, loss_kwargs={"mask": mask})


def test_a_loss_that_was_a_mean_over_rows_until_masks_became_uneven_is_refused_then() -> None:
    pipe = pipeline(masked)
    x, y, mask = batch()
    pipe.step(x, target=y, loss_kwargs={"mask": torch.ones_like(mask)})
    pipe.step(x, target=y, loss_kwargs={"mask": torch.ones_like(mask)})
    assert "taken together" in refused(pipe, x, target=y, loss_kwargs={"mask": mask})


def nan_masked(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.nan_to_num()).square()[~target.isnan()].mean()


def weighted(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return ((output - target).square().mean(-1) * weight).sum() / weight.sum()


@pytest.mark.parametrize("what", ["fractions as a mask", "weights", "nan", "-100 among zeros", "lengths"])
def test_it_is_asked_again_when_what_counts_becomes_uneven(what: str) -> None:
    """Only whole numbers were looked at, and a label 0 in the first step hid the first -100 of a later one."""
    x, y, mask = batch()
    later = torch.rand(mask.shape).double() + 0.5
    if what == "nan":
        uneven = y.clone()
        uneven[0, :, :3] = torch.nan
        steps: list[dict[str, Any]] = [{"target": y}, {"target": uneven}]
        pipe = pipeline(nan_masked)
    elif what == "-100 among zeros":
        labels = torch.zeros(mask.shape, dtype=torch.long)
        labels[:4] = 1  # 0 is uneven from the first step on
        ignored = labels.clone()
        ignored[0] = -100

        def valid(output: Tensor, target: Tensor) -> Tensor:
            each = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
            return each.sum() / (target != -100).sum()

        steps, pipe = [{"target": labels}, {"target": ignored}], pipeline(valid)
    else:
        now = {"fractions as a mask": mask.double(), "weights": later, "lengths": (later * 9).long()}[what]
        told = ({"weight": torch.ones_like(now)}, {"weight": now})
        steps, pipe = [{"target": y, "loss_kwargs": each} for each in told], pipeline(weighted)
    pipe.step(x, **steps[0])
    pipe.step(x, **steps[0])
    assert "taken together" in refused(pipe, x, **steps[1])


def test_it_is_asked_once_for_each_kind_of_batch() -> None:
    calls: list[int] = []

    def counted(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(output))
        return (output - target).square().mean()

    pipe = pipeline(counted)
    x, y, _ = batch()
    for rows, wanted in ((8, 2 * M - 1), (8, M), (7, M), (6, 2 * M - 1), (8, M)):  # microbatch 0 has 3, 3, 3, 2, 3 rows
        calls.clear()
        pipe.step(x[:rows], target=y[:rows])
        assert len(calls) == wanted
    calls.clear()
    pipe.evaluate(x, target=y)
    assert len(calls) == M
