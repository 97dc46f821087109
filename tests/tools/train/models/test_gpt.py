"""The built-in GPT: what a token may look at, and documents that share a row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock
from penstock.tools.train.config.settings import GPTOptions
from penstock.tools.train.models.gpt import build_gpt, within_documents


def small(sequence: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return build_gpt(GPTOptions(layers=2, width=16, heads=2, vocabulary=50), sequence).double()


def test_a_token_sees_itself_and_what_came_before() -> None:
    model, tokens = small(), torch.randint(50, (1, 8))
    before = model(tokens)
    tokens[0, 5] = (tokens[0, 5] + 1) % 50
    after = model(tokens)
    assert torch.equal(after[:, :5], before[:, :5])
    assert not torch.isclose(after[:, 5:], before[:, 5:]).all(-1).any()


def test_a_row_longer_than_the_table_of_places_is_refused_with_both_lengths() -> None:
    with pytest.raises(ValueError, match="a row has 9 tokens, the model takes 8 at most"):
        small(8)(torch.zeros(1, 9, dtype=torch.int64))
    assert build_gpt(GPTOptions(context=9), 8).embed.place.num_embeddings == 9


def test_what_documents_of_a_row_may_look_at() -> None:
    mask = within_documents(torch.tensor([[0, 1, 0, 1]]))
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_packed_documents_are_treated_as_if_each_were_alone() -> None:
    model, lengths = small(), (6, 2, 5)
    documents = [torch.randint(1, 50, (length,)) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.stack([torch.cat(documents), positions])[None]
    packed = model(rows)[0]
    alone = torch.cat([model(each[None])[0] for each in documents])
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-14)
    with penstock.Pipeline(model, stages=3, microbatches=1) as pipe:
        assert torch.equal(pipe.predict(rows)[0], packed)
