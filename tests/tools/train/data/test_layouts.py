"""Rows of a batch: padded or packed, and packed documents as if each were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.errors import ModelError
from penstock.tools.train.build import build_model, build_pipeline
from penstock.tools.train.config.read import load_config
from penstock.tools.train.config.settings import GPTOptions
from penstock.tools.train.data.checks import check_packing
from penstock.tools.train.data.documents import Document
from penstock.tools.train.data.layouts import Packed, Padded
from penstock.tools.train.loss import TokenLoss
from penstock.tools.train.models.gpt import build_gpt


def documents(*lengths: int) -> list[Document]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(1, 50, (length + 1,), generator=generator, dtype=torch.int32) for length in lengths]
    return [Document(each[:-1], each[1:]) for each in tokens]


def test_padded_rows_are_as_wide_as_the_longest() -> None:
    some = documents(3, 5, 1)
    batch = Padded(bare=False).batch([[each] for each in some] + [[]])
    assert batch.kwargs["input_ids"].shape == (4, 5)
    assert batch.kwargs["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert batch.target[0].tolist() == [*some[0].targets.tolist(), -100, -100]
    assert (batch.target[3] == -100).all()
    assert batch.tokens == 9
    bare = Padded(bare=True).batch([[each] for each in some])
    assert (bare.kwargs, bare.args[0].shape) == ({}, (3, 5))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=40))
def test_packing_keeps_every_document_whole_and_never_overfills(lengths: list[int]) -> None:
    some = documents(*lengths)
    rows = Packed(12, stacked=False).rows(some)
    assert sorted(id(each) for row in rows for each in row) == sorted(map(id, some))
    assert all(sum(map(len, row)) <= 12 for row in rows)
    assert len(rows) <= 1 or sum(sorted(sum(map(len, row)) for row in rows)[:2]) > 12  # no two could be one


def test_positions_begin_again_with_each_document() -> None:
    some = documents(3, 2)
    batch = Packed(8, stacked=False).batch([some])
    assert batch.kwargs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.target.tolist() == [[*some[0].targets.tolist(), *some[1].targets.tolist(), -100, -100, -100]]
    assert batch.tokens == 5
    stacked = Packed(8, stacked=True).batch([some]).args[0]
    assert torch.equal(stacked[:, 0], batch.kwargs["input_ids"])
    assert torch.equal(stacked[:, 1], batch.kwargs["position_ids"])


def test_packed_and_padded_rows_have_the_same_loss_and_gradient() -> None:
    some = documents(6, 2, 5, 9, 1, 3)
    found = []
    for layout in (Packed(12, stacked=True), Padded(bare=True)):
        torch.manual_seed(0)
        model = build_gpt(GPTOptions(layers=2, width=16, heads=2), 16).double()
        rows, loss = layout.rows(some), TokenLoss()
        half = -(-len(rows) // 2)
        passes = [layout.batch(rows[:half]), layout.batch(rows[half:])]  # of different numbers of tokens
        with penstock.Pipeline(
            model, stages=2, microbatches=1, loss_fn=loss, loss_options=loss.options, schedule="1f1b"
        ) as pipe:
            shares = loss.shares([batch.target for batch in passes])
            losses = [
                pipe.step(*batch.args, target=batch.target, loss_kwargs=share).loss
                for batch, share in zip(passes, shares, strict=True)
            ]
        found.append((sum(losses), [parameter.grad for parameter in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=1e-14)


SHAPE = "vocab_size=64,hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=4"
MODELS = {
    "llama": SHAPE,
    "mistral": SHAPE + ",num_key_value_heads=2,sliding_window=4",
    "gpt2": "vocab_size=64,n_embd=32,n_layer=2,n_head=4",
    "mixtral": SHAPE + ",num_key_value_heads=2,num_local_experts=4",
    "gptj": "vocab_size=64,n_embd=32,n_layer=2,n_head=4,rotary_dim=4",
}
LEAKS = {
    "opt": "vocab_size=64,hidden_size=32,ffn_dim=64,num_hidden_layers=2,num_attention_heads=4,word_embed_proj_dim=32",
    "bloom": "vocab_size=64,hidden_size=32,n_layer=2,n_head=4",
    "mamba": "vocab_size=64,hidden_size=32,num_hidden_layers=2",
}


def pipeline_of(name: str, options: str) -> tuple[Any, Any, penstock.Pipeline]:
    config = load_config(
        None,
        [
            f"model.source=huggingface:{name}",
            f"model.options={{{options}}}",
            "pipeline.ranks=2",
            "data.packing=true",
            "data.sequence=16",
        ],
    )
    model, _ = build_model(config)
    batch = Packed(16, stacked=False).batch([documents(6, 2, 5)] * 8)
    return config, model, build_pipeline(config, model, None, batch, ranks=2, transport="threads")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_treat_packed_documents_as_if_each_were_alone(name: str) -> None:
    config, model, pipe = pipeline_of(name, MODELS[name])
    some = documents(6, 2, 5)
    with pipe:
        packed = pipe.predict(**Packed(16, stacked=False).batch([some]).kwargs).logits[0]
        model.eval()
        alone = torch.cat([model(each.inputs[None].long()).logits[0] for each in some])
        torch.testing.assert_close(packed[:13], alone.detach(), rtol=1e-4, atol=1e-5)
        check_packing(pipe, config, 64)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAKS)
def test_a_model_that_mixes_packed_documents_is_refused(name: str) -> None:
    config, _, pipe = pipeline_of(name, LEAKS[name])
    with pipe, pytest.raises(ModelError, match="does not keep the documents of a row apart"):
        check_packing(pipe, config, 64)
