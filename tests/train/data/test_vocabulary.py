"""Tokens and positions beyond a model's tables are refused with both numbers, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.train.build import build_model
from penstock.train.config.read import load_config
from penstock.train.data.batches import open_data
from penstock.train.data.vocabulary import check_vocabulary

SHAPES = {
    "gpt2": "{n_embd = 8, n_layer = 1, n_head = 2, n_positions = 32, vocab_size = 256}",
    "opt": "{hidden_size = 8, num_hidden_layers = 1, num_attention_heads = 2, ffn_dim = 8, word_embed_proj_dim = 8, "
    "max_position_embeddings = 32, vocab_size = 256}",
    "llama": "{hidden_size = 8, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 8, "
    "max_position_embeddings = 32, vocab_size = 256}",
}


def check(folder: Path, name: str, *changes: str) -> None:
    text = folder / "text.txt"
    text.write_text("what a model reads\n" * 100)
    source = [f"data.source={text}", f"model.source=huggingface:{name}", f"model.options={SHAPES[name]}"]
    config = load_config(None, [*source, "data.batch=8", *changes])
    check_vocabulary(config, build_model(config)[0], open_data(config))


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_rows_longer_than_a_table_of_positions_are_refused(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, "data.sequence=32")
    with pytest.raises(UsageError, match=r"sequence is 33, and .* a table of 32 positions; set data.sequence to 32"):
        check(tmp_path, name, "data.sequence=33")


def test_positions_that_are_computed_have_no_end(tmp_path: Path) -> None:
    check(tmp_path, "llama", "data.sequence=64")
