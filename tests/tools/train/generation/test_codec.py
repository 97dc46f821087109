"""What the tokens of a trained model mean, and text that comes token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizers import PROMPT, TURNS, saved

from penstock.errors import UsageError
from penstock.tools.train.config.read import load_config
from penstock.tools.train.data.tokenizer import open_tokenizer
from penstock.tools.train.generation.codec import ByteCodec, Reader, TokenizerCodec, codec_of, tokenizer_path


def test_a_question_is_written_up_to_where_the_answer_begins(tmp_path: Path) -> None:
    saved(tmp_path / "chats", TURNS + PROMPT)
    words = TokenizerCodec(str(tmp_path / "chats"), "")
    opened = open_tokenizer(str(tmp_path / "chats"))
    wanted = opened.spans("<|user|>Hello<|end|><|assistant|>").ids
    assert words.encode_question("Hello") == wanted
    saved(tmp_path / "plain", None)
    with pytest.raises(UsageError, match="has no chat template"):
        TokenizerCodec(str(tmp_path / "plain"), "").encode_question("Hello")
    with pytest.raises(UsageError, match="this model reads bytes; give --prompt"):
        ByteCodec().encode_question("Hello")


def test_a_character_of_several_tokens_is_written_once_it_is_whole() -> None:
    reader = Reader(ByteCodec())
    assert [reader.add(byte) for byte in "aé".encode()] == ["a", "", "é"]
    assert reader.finish() == ""
    assert [reader.add("é".encode()[0]), reader.finish()] == ["", "\N{REPLACEMENT CHARACTER}"]


def test_any_command_line_can_be_written_in_bytes() -> None:
    codec = ByteCodec()
    assert codec.decode(codec.encode("é\n")) == "é\n"
    assert codec.encode("") == [ord("\n")]  # something to begin after
    assert codec.encode("\udcff") == [255]  # an argument that was no UTF-8


def test_numbers_mean_nothing_without_a_tokenizer(tmp_path: Path) -> None:
    assert isinstance(codec_of(load_config(None, []), None), ByteCodec)
    with pytest.raises(UsageError, match=r"data\.tokens was uint16, and nothing says what these numbers mean"):
        codec_of(load_config(None, ["data.tokens=uint16"]), None)
    with pytest.raises(UsageError, match="rows held input_ids, and nothing says"):
        codec_of(load_config(None, ["data.source=rows.jsonl"]), None)


def test_the_tokenizer_of_the_run_comes_before_that_of_the_models_folder(tmp_path: Path) -> None:
    saved(tmp_path / "model", None)
    bare, named = load_config(None, []), load_config(None, ["data.tokenizer=mine"])
    assert tokenizer_path(bare, str(tmp_path / "model")) == str(tmp_path / "model")
    assert tokenizer_path(bare, str(tmp_path)) == ""
    assert tokenizer_path(named, str(tmp_path / "model")) == "mine"
