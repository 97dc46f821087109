"""What is no product and yet matters to a split backward: attention, embeddings, gradients inside of a forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runtime.backward.comparing import Apply, check, mlp, normal
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.runtime.backward.deferring_mode import DeferrableParameters, DeferringMode


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_and_torchs_encoder_layer(batch_first: bool) -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=batch_first)
    assert check(Apply(lambda m, x: m.attention(x, x, x)[0], attention=attention), normal(3, 5, 16)) == 2
    # Keys of another source: the packed weight is used through views of it.
    crossed = Apply(lambda m, x, y: m.attention(x, y, y), attention=copy.deepcopy(attention))
    assert check(crossed, lambda: [torch.randn(3, 5, 16), torch.randn(3, 5, 16)]) == 1
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=batch_first)
    assert check(layer, normal(3, 5, 16)) == 4


def tokens() -> list[Tensor]:
    return [torch.randint(0, 11, (2, 5))]


def test_an_embedding_waits_too_so_a_tied_head_fires_hooks_once() -> None:
    table = nn.Embedding(11, 6)
    assert check(table, tokens) == 1
    tied = Apply(lambda m, ids: F.linear(m.layer(m.table(ids)), m.table.weight), table=table, layer=nn.Linear(6, 6))
    assert check(tied, tokens) == 3
    assert check(nn.Embedding(11, 6, padding_idx=0, scale_grad_by_freq=True), tokens) == 1
    assert check(nn.Embedding(11, 6, sparse=True), tokens) == 1


def test_a_forward_that_differentiates_is_left_whole() -> None:
    def force(m: Any, x: Tensor) -> Tensor:
        energy = m.model(x).sum()
        (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
        return gradient

    assert check(Apply(force, model=mlp(6)), normal(4, 6)) == 0


def test_a_forward_that_starts_to_differentiate_later_is_refused() -> None:
    layer, parameters = nn.Linear(6, 6), DeferrableParameters()
    recording = DeferringMode(parameters)
    x = torch.randn(4, 6, requires_grad=True)
    with recording:
        y = layer(x)
    recording.learn([y])
    with DeferringMode(parameters):
        y = layer(x)
        with pytest.raises(ModelError, match="choose a schedule without W"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
