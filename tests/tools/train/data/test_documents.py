"""Rows of text, of prompts and of chats become tokens and targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import CHAT, PROMPT, TURNS, saved

from penstock.errors import UsageError
from penstock.tools.train.config.read import load_config
from penstock.tools.train.data.batches import open_data
from penstock.tools.train.data.documents import Encoder
from penstock.tools.train.data.records import JsonLines, Record, RowPlace


def test_a_chat_without_answers_says_which_roles_it_has(tmp_path: Path) -> None:
    saved(tmp_path / "model", TURNS + PROMPT)
    path = tmp_path / "chats.jsonl"
    encoder = Encoder(load_config(None, [f"data.source={path}", f"data.tokenizer={tmp_path / 'model'}"]).data)
    values = {"messages": [{"role": "user", "content": "Hello"}, {"role": "user", "content": "Bye"}]}
    path.write_text("")
    with pytest.raises(UsageError, match=r"no answer in it .its roles are user; answers are those of assistant"):
        encoder.encode(Record(values, RowPlace(JsonLines(path), 0), 1))
    strange = Record({"conversations": []}, RowPlace(JsonLines(path), 0), 1)
    with pytest.raises(UsageError, match=r'write "conversations" of .from, value. as "messages"'):
        Encoder(encoder.options).encode(strange)


def test_rows_of_text_prompts_and_chats(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, TURNS + PROMPT)
    words = tokenizer.of_transformers.decode

    def targets(row: dict[str, Any], *changes: str) -> str:
        options = load_config(None, [f"data.tokenizer={tmp_path}", *changes]).data
        (document,) = Encoder(options).encode(Record(row, RowPlace(JsonLines(tmp_path), 0), 1))
        return str(words([each for each in document.targets.tolist() if each != -100]))

    assert targets({"text": "Hello"}).endswith("ello<|end|>"[-7:])
    assert targets({"prompt": "Hello ", "completion": "Bye"}) == "Bye<|end|>"
    assert targets({"prompt": "Hello ", "completion": "Bye"}, "data.loss_on=all").endswith(" Bye<|end|>")
    assert targets({"messages": CHAT}) == "Good day<|end|>Well<|end|>"
    assert targets({"said": CHAT}, "data.columns={messages='said'}") == "Good day<|end|>Well<|end|>"
    assert targets({"messages": CHAT, "text": "Bye"}, "data.format=text").endswith("<|end|>")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": CHAT[:1]}) + "\n")
    with pytest.raises(UsageError, match=r"rows.jsonl, line 1 has nothing to learn: no answer in it"):
        open_data(load_config(None, [f"data.source={rows}", f"data.tokenizer={tmp_path}"]))
    with pytest.raises(UsageError, match=r"need data.tokenizer"):
        open_data(load_config(None, [f"data.source={rows}"]))
    bare = tmp_path / "bare"
    saved(bare, None)
    with pytest.raises(UsageError, match="has no chat template"):
        open_data(load_config(None, [f"data.source={rows}", f"data.tokenizer={bare}"]))
