"""`predict(reduce=)`: what the last stage makes of each microbatch, and keeps in the place of its output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PenstockError, UsageError


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11)).double()


def pipeline(made: nn.Module) -> penstock.Pipeline:
    loss = lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten())  # noqa: E731
    return penstock.Pipeline(made, stages=2, microbatches=2, loss_fn=loss)


def log_probabilities(output: Tensor, labels: Tensor) -> Tensor:
    return output.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def test_a_reduced_prediction_is_the_function_of_the_whole_output() -> None:
    made = model()
    x, y = torch.randint(0, 11, (2, 6, 5))
    with pipeline(made) as pipe:
        found = pipe.predict(x, reduce=log_probabilities, reduce_kwargs={"labels": y})
    assert torch.equal(found, log_probabilities(made(x), y))
    assert not found.requires_grad


def test_microbatches_of_different_lengths_give_one_entry_each() -> None:
    made = model()
    inputs = [torch.randint(0, 11, (2, length)) for length in (3, 7, 4)]
    labels = [torch.randint(0, 11, (2, length)) for length in (3, 7, 4)]
    with pipeline(made) as pipe:
        found = pipe.predict(
            penstock.Microbatches(inputs),
            reduce=log_probabilities,
            reduce_kwargs={"labels": penstock.Microbatches(labels)},
        )
        assert [tuple(each.shape) for each in found] == [(2, 3), (2, 7), (2, 4)]
        for got, x, y in zip(found, inputs, labels, strict=True):
            assert torch.equal(got, log_probabilities(made(x), y))
        pipe.step(inputs[0], target=labels[0])  # and training goes on


def test_what_cannot_be_called_is_refused_and_what_raises_is_named() -> None:
    x = torch.randint(0, 11, (4, 3))

    def broken(output: Tensor) -> Tensor:
        raise ArithmeticError("no such number")

    with pipeline(model()) as pipe:
        with pytest.raises(UsageError, match=r"missing a required argument: 'labels'"):
            pipe.predict(x, reduce=log_probabilities)
        with pytest.raises(UsageError, match=r"which was not passed"):
            pipe.predict(x, reduce_kwargs={"labels": x})
        with pytest.raises((PenstockError, ArithmeticError), match="no such number"):
            pipe.predict(x, reduce=broken)
        assert pipe.predict(x).shape == (4, 3, 11)
