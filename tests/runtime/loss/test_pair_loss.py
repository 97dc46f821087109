"""Two microbatches as one, for the check of a loss: their rows are joined, and the call leaves no trace."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from runtime.loss.asked import LENGTH, WIDTH, M, batch, close, masked, pipeline, refused, stepped, whole
from torch import Tensor, nn

import penstock
from penstock import BatchOptions, LossOptions
from penstock.runtime.loss import pair_check


class Stateful(nn.Module):
    """A loss that counts, and remembers what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []
        self.register_buffer("total", torch.zeros(()).double())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.total += output.detach().sum()
        self.seen.append(len(output))
        return (output - target).square().mean()


def test_the_state_of_a_loss_is_that_of_its_own_calls() -> None:
    x, y, _ = batch()
    found = []
    for asked in (False, True):
        loss = Stateful()
        pipe = pipeline(loss, loss_options=LossOptions(per_microbatch=not asked))
        result = stepped(pipe, x, target=y)
        found.append((result, loss.calls, loss.seen, loss.total))
    assert found[0][1:3] == found[1][1:3] == (M, [3, 3, 2])
    assert torch.equal(found[0][3], found[1][3])
    close(found[0][0], found[1][0])


@pytest.mark.parametrize("source", ["torch", "python"])
def test_a_loss_that_draws_cannot_be_asked_and_draws_the_same_numbers(source: str) -> None:
    def noisy(output: Tensor, target: Tensor) -> Tensor:
        noise = torch.rand(()).item() if source == "torch" else random.random()
        return (output - target).square().mean() * noise

    x, y, _ = batch()
    found = []
    for asked in (False, True):
        random.seed(5)
        pipe = pipeline(noisy, loss_options=LossOptions(per_microbatch=not asked), seed=4, ranks=2)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found.append((stepped(pipe, x, target=y), stepped(pipe, x, target=y), random.random()))
        assert ["could not be checked: it draws random numbers" in str(each.message) for each in said] == [True] * asked
    close(found[0], found[1])


def test_of_large_outputs_a_few_rows_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_check, "BYTES", 2 * LENGTH * WIDTH * 8)  # two rows
    sizes: list[int] = []

    def mean(output: Tensor, target: Tensor, scale: Tensor) -> Tensor:
        sizes.append(len(output))
        return ((output - target) * scale).square().mean()

    x, y, mask = batch()
    scale = penstock.Shared(torch.rand(WIDTH).double())
    pipeline(mean).step(x, target=y, loss_kwargs={"scale": scale})
    assert sizes == [3, 2, 3, 2, 4, 2, 4]
    said = refused(pipeline(masked), x, target=y, loss_kwargs={"mask": mask})
    assert "(weighing 2) and" in said
    pipe = pipeline(masked, loss_options=LossOptions(weight=lambda mask: mask.sum()))
    close(stepped(pipe, x, target=y, loss_kwargs={"mask": mask}), whole(masked, x, y, mask=mask))


def test_rows_may_be_in_another_dimension() -> None:
    def total(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum((0, 2)).mean()

    x, y, _ = batch()
    x, y = x.transpose(0, 1), y.transpose(0, 1)
    pipe = pipeline(total, batch_options=BatchOptions(dims={0: 1, "target": 1, "output": 1}))
    close(stepped(pipe, x, target=y), whole(total, x, y))
