"""A replayed model in another mode than the one in which it was cut: its plan holds there too, or it is refused.

A model that was cut in eval mode was recorded in eval mode only. What its code does in training mode alone (a value
that is needed further on, an in-place operation, a counter) was not in the plan, and trained wrongly without an error.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model.nets import Chain, W, square
from torch import Tensor, nn

import penstock
from penstock.errors import ModelError, PeerFailure


class Skips(Chain):
    """In training mode, what the first block returned is needed again, after the last, and changed in place before."""

    def forward(self, x: Tensor) -> Tensor:
        first = out = self.blocks[0](x)
        if self.training:
            first.mul_(2.0)
        for block in self.blocks[1:]:
            out = torch.tanh(block(out))
        return out + first if self.training else out


class Reversed(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks) if self.training else self.blocks:
            x = torch.tanh(block(x))
        return x


class Counts(Chain):
    """A buffer of the model that its own code changes in one mode."""

    def __init__(self, when: bool) -> None:
        super().__init__()
        self.when = when
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        if self.training == self.when:
            self.calls.add_(1.0)
        return super().forward(x)


def piped(model: nn.Module) -> penstock.Pipeline:
    return penstock.Pipeline(
        model,
        stages=2,
        microbatches=2,
        loss_fn=square,
        cut_options=penstock.CutOptions(method="replay"),
        example=(torch.ones(2, W).cumsum(0),),
    )


def test_what_only_training_needs_is_in_the_plan_of_a_model_that_was_cut_in_eval_mode() -> None:
    torch.manual_seed(0)
    model, x = Skips(), torch.randn(4, W)
    plain = copy.deepcopy(model)
    with piped(model.eval()) as pipe:
        pipe.evaluate(x)
        model.train()
        found = pipe.step(x).loss
        expected = torch.zeros(())
        for rows in x.chunk(2):
            loss = square(plain(rows)) / 2
            loss.backward()
            expected = expected + loss.detach()
        torch.testing.assert_close(found, expected)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


@pytest.mark.parametrize(
    ("model", "words"),
    [(Reversed(), "calls blocks.3 where blocks.0"), (Counts(True), "changes the buffer calls in place")],
)
def test_a_model_that_has_no_plan_for_training_evaluates_and_is_refused_when_it_trains(
    model: nn.Module, words: str
) -> None:
    x = torch.randn(4, W)
    with piped(model.eval()) as pipe:
        pipe.evaluate(x)
        pipe.train()
        with pytest.raises(ModelError, match=f"in training mode.*{words}.*new Pipeline"):
            pipe.step(x)
        pipe.eval()
        pipe.evaluate(x)


def test_what_the_code_changes_only_in_evaluation_is_refused() -> None:
    x = torch.randn(4, W)
    with piped(Counts(False)) as pipe:
        pipe.step(x)
        with pytest.raises((ModelError, PeerFailure), match="changes a buffer of Counts in place"):
            pipe.evaluate(x)
