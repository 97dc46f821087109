"""The pipeline behind a schedule of torch's: its options, and losses that torch counts in its own way."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from compat.small_stages import stages
from torch import nn

import penstock
import penstock.compat.pipelining as ours
from penstock.errors import UsageError


def test_options_of_a_pipeline_are_at_hand() -> None:
    schedule = ours.ScheduleInterleaved1F1B(stages(2), 2, loss_fn=nn.functional.mse_loss)
    schedule.options = {"recompute": "always", "precision": "bf16"}
    assert schedule.step(torch.randn(4, 4), target=torch.randn(4, 4)).dtype is torch.bfloat16
    assert schedule.pipeline.recompute == "always"


def test_ignored_tokens_count_as_in_torch_with_a_warning_or_as_the_options_say() -> None:
    """torch takes the mean of means: gradients were off by 93 % in silence, and the option was a raw TypeError."""
    torch.manual_seed(1)
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, -100, -100, 3])
    for given in (None, penstock.LossOptions()):
        made = stages(2)
        schedule = ours.ScheduleInterleaved1F1B(made, 3, loss_fn=nn.functional.cross_entropy)
        schedule.options = {} if given is None else {"loss_options": given}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                schedule.pipeline.zero_grad()
                schedule.step(x, target=y)
        found = [parameter.grad for parameter in made[0].submod.parameters()]
        model = nn.Sequential(*(copy.deepcopy(stage.submod) for stage in made))
        model.zero_grad()
        parts = list(zip(model(x).split(2), y.split(2), strict=True))
        if given is None:
            (sum(nn.functional.cross_entropy(*part) for part in parts) / 3).backward()
        else:
            nn.functional.cross_entropy(model(x), y).backward()
        torch.testing.assert_close(found, [parameter.grad for parameter in model[0].parameters()])
        said = [str(each.message) for each in caught]
        assert len(said) == (given is None)
        assert given is not None or "means over 2 and 1 entries" in said[0]
        assert given is not None or "{'loss_options': penstock.LossOptions()}" in said[0]


@pytest.mark.parametrize(("name", "why"), [("loss_fn", "the schedule's own"), ("lossoptions", "no argument of Pip")])
def test_options_that_a_pipeline_does_not_take_are_refused(name: str, why: str) -> None:
    schedule = ours.ScheduleInterleaved1F1B(stages(2), 2, loss_fn=nn.functional.mse_loss)
    schedule.options = {name: None}
    with pytest.raises(UsageError, match=f"'{name}', which is {why}"):
        schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))
