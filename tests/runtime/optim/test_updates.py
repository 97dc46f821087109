"""What all ranks make of one update: whether it is made, and whether with the gradients as they are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from penstock.errors import UsageError
from penstock.runtime.optim.updates import Updates


def updates(clip: float | None = None, skip_nonfinite: bool = False) -> Updates:
    return Updates(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), None, clip, skip_nonfinite)


def part(value: float) -> tuple[float, torch.dtype]:
    return value, torch.float32


def test_without_a_limit_nothing_depends_on_other_ranks():
    decision = updates().decide([None, None], math.nan)
    assert (decision.norm, decision.applied, decision.as_is) == (None, True, True)


@pytest.mark.parametrize(("limit", "as_is"), [(5.1, True), (4.9, False), (5.0, False)])
def test_the_norm_of_all_ranks_decides_whether_gradients_stay_as_they_are(limit, as_is):
    """At the limit itself torch's clipping multiplies by a little less than 1: it adds 1e-6 to the norm."""
    decision = updates(limit).decide([part(3.0), None, part(4.0)], 1.0)
    assert decision.norm.item() == 5.0
    assert decision.as_is is as_is
    assert decision.applied


@pytest.mark.parametrize("limit", [1e-3, 0.4, 0.99, 1.0, 1.0 + 1e-6, 1.01, 7.0])
def test_as_is_means_that_torch_would_not_change_a_bit(limit):
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([0.6, 0.8, 0.0])
    before = parameter.grad.clone()
    norm = nn.utils.clip_grad_norm_([parameter], limit)
    decision = updates(limit).decide([(norm.item(), norm.dtype)], 0.0)
    assert decision.as_is == torch.equal(before, parameter.grad)


@pytest.mark.parametrize(("norm", "loss"), [(math.inf, 1.0), (math.nan, 1.0), (1.0, math.nan)])
def test_what_is_not_finite_is_left_out_if_that_is_asked_for(norm, loss):
    assert not updates(skip_nonfinite=True).decide([part(norm)], loss).applied
    assert updates(clip=9.0).decide([part(norm)], loss).applied
    assert updates(skip_nonfinite=True).decide([part(1.0)], None).as_is


def test_an_update_that_is_left_out_drops_its_gradients_and_says_so():
    chosen = updates(skip_nonfinite=True)
    (parameter,) = chosen.optimizer.param_groups[0]["params"]
    parameter.grad = torch.full((2,), math.inf)
    assert not chosen.apply(chosen.decide([part(math.inf)], 1.0), [parameter])
    assert parameter.grad is None
    assert torch.equal(parameter.detach(), torch.ones(2))


def test_a_limit_below_0_is_refused():
    with pytest.raises(UsageError, match="clip=-1"):
        updates(-1)


def test_what_could_train_nothing_is_refused_before_the_first_step():
    """An optimizer over other tensors trained on with `updated=True`; a plateau's step() failed after the update."""
    own, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([own])
    with pytest.raises(UsageError, match="none of the 1 parameters"):
        Updates(torch.optim.SGD([other]), None, None, False).check_parameters([own])
    Updates(optimizer, None, None, False).check_parameters([own, other])
    Updates(optimizer, None, None, False).check_parameters([])  # a rank whose stages have none
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    Updates(optimizer, None, None, False).check_parameters([frozen])  # or train none
    with pytest.raises(UsageError, match="another optimizer"):
        Updates(optimizer, torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD([own]), 0.5), None, False)
    with pytest.raises(UsageError, match="without arguments"):
        Updates(optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), None, False)
    with pytest.raises(UsageError, match="without arguments"):
        Updates(optimizer, torch.optim.lr_scheduler.ExponentialLR, None, False)
    with pytest.raises(UsageError, match="LBFGS"):
        Updates(torch.optim.LBFGS([own]), None, None, False)
