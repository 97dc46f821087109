"""Tokens and positions beyond a model's tables are refused with both numbers, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.tools.train.build import build_model
from penstock.tools.train.config.read import load_config
from penstock.tools.train.data.batches import open_data
from penstock.tools.train.data.checks import check_vocabulary, position_warning

SHAPES = {
    "gpt2": "{n_embd = 8, n_layer = 1, n_head = 2, n_positions = 32, vocab_size = 256}",
    "opt": "{hidden_size = 8, num_hidden_layers = 1, num_attention_heads = 2, ffn_dim = 8, word_embed_proj_dim = 8, "
    "max_position_embeddings = 32, vocab_size = 256}",
    "llama": "{hidden_size = 8, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 8, "
    "max_position_embeddings = 32, vocab_size = 256}",
}


def check(folder: Path, name: str, *changes: str) -> str:
    """Refuse what cannot be trained; what is warned about."""
    text = folder / "text.txt"
    text.write_text("what a model reads\n" * 100)
    source = [f"data.source={text}", f"model.source=huggingface:{name}", f"model.options={SHAPES[name]}"]
    config = load_config(None, [*source, "data.batch=8", *changes])
    model, data = build_model(config)[0], open_data(config)
    check_vocabulary(config, model, data)
    return position_warning(model, data)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_rows_longer_than_a_table_of_positions_are_refused(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, "data.sequence=32")
    with pytest.raises(UsageError, match=r"sequence is 33, and .* a table of 32 positions; set data.sequence to 32"):
        check(tmp_path, name, "data.sequence=33")


def test_rows_beyond_positions_that_are_computed_are_warned_about(tmp_path: Path) -> None:
    """A Llama can read longer rows than it was made for; that was trained without a word."""
    assert check(tmp_path, "llama", "data.sequence=32") == ""
    warning = check(tmp_path, "llama", "data.sequence=64")
    assert "rows have up to 64 tokens, and the model was made for 32 (max_position_embeddings)" in warning
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": list(range(length))}) + "\n" for length in (9, 41)))
    rows_of = ["data.sequence=64", "data.validation=0", "data.batch=8", f"data.source={rows}"]
    assert "rows have up to 40 tokens" in check(tmp_path, "llama", *rows_of)  # the last is only predicted
    rows.write_text(json.dumps({"input_ids": [1] * 33}) + "\n")
    assert check(tmp_path, "llama", *rows_of) == ""  # what there may be is more than what there is
    assert "up to 64" in check(tmp_path, "llama", *rows_of, "data.streaming=true")
