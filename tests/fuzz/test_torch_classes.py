"""Random trainings with the classes of `compat.pipelining`: gradients are the whole batch's, or a warning says not."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.compat.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from penstock.compat.pipelining.translated import TranslatedBatches

SCHEDULES = [ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleLoopedBFS]
CLASSES, ROUNDINGS = 5, 1e-9
PADDING = {"ignores another": 2, "own": 1}  # -100 with all others


def entropy(**options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda out, target: F.cross_entropy(out, target, **options)


def own_mean(out: Tensor, target: Tensor) -> Tensor:
    kept = target != 1
    return (F.cross_entropy(out, target.clamp(min=0), reduction="none") * kept).sum() / kept.sum()


LOSSES = {
    "mean": nn.CrossEntropyLoss(),
    "ignores another": nn.CrossEntropyLoss(ignore_index=2),
    "smoothed": entropy(label_smoothing=0.1),
    "weighted": entropy(weight=torch.arange(1.0, CLASSES + 1, dtype=torch.float64)),
    "own": own_mean,
    "likelihood": lambda out, target: F.nll_loss(out.log_softmax(-1), target),
}


@dataclass
class Found:
    """What came of one training: how far its gradients are from the plain loop's, and whether a warning said so."""

    seed: int
    difference: float
    warned: bool

    @property
    def silent(self) -> bool:
        return self.difference > ROUNDINGS and not self.warned


def trained(seed: int) -> Found:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    width, stages, microbatches = chance.choice([3, 4]), chance.choice([2, 3]), chance.choice([2, 4])
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(stages - 1)]
    model = nn.Sequential(*layers, nn.Linear(width, CLASSES)).double()
    name = chance.choice(sorted(LOSSES))
    loss = LOSSES[name]
    rows = 2 * microbatches
    made = [PipelineStage(model[number], number, stages, "cpu") for number in range(stages)]
    schedule = chance.choice(SCHEDULES)(made, microbatches, loss_fn=loss)
    asked = chance.random() < 0.3
    if asked:
        schedule.options = {"loss_options": penstock.LossOptions()}
    difference = 0.0
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2):
            x, target = torch.randn(rows, width, dtype=torch.float64), torch.randint(0, CLASSES, (rows,))
            for row in range(rows):
                if row % 2 and chance.random() < 0.4:  # No microbatch is without a target.
                    target[row] = PADDING.get(name, -100)
            target[::2] = target[::2].where(target[::2] > 2, 3)
            wanted = torch.autograd.grad(loss(model(x), target), list(model.parameters()))
            model.zero_grad()
            schedule.step(x, target=target)
            got = [parameter.grad for parameter in model.parameters()]
            difference = max(difference, *(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True)))
    warned = any("LossOptions" in str(each.message) for each in heard)
    assert not (asked and difference > ROUNDINGS), f"seed {seed}: not the batch's gradients, which were asked for"
    return Found(seed, difference, warned)


def test_gradients_are_the_batchs_or_a_warning_says_that_they_are_not() -> None:
    """With ignored tokens they were off by 93 %, as in torch itself, without a word."""
    found = [trained(seed) for seed in range(40)]
    assert [each for each in found if each.silent] == []
    assert {each.difference > ROUNDINGS for each in found} == {False, True}


def test_a_missing_warning_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TranslatedBatches, "uneven", lambda self, what: None)
    assert any(trained(seed).silent for seed in range(40))
