"""Which tokens of a chat are learned: the answers with their ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import CHAT, MARKED, PROMPT, TURNS, saved

from penstock.errors import UsageError
from penstock.tools.train.data.chat import encode_chat
from penstock.tools.train.data.tokenizer import Tokenizer


def learned(tokenizer: Tokenizer, messages: Any) -> list[str]:
    """The pieces of a chat that are learned, whole."""
    ids, marks = encode_chat(tokenizer, messages, True, "here")
    pieces, before = [""], False
    for token, mark in zip(ids, marks, strict=True):
        pieces += [""] if mark and not before else []
        pieces[-1] += tokenizer.of_transformers.decode([token]) if mark else ""
        before = mark
    return pieces[1:]


@pytest.mark.parametrize("template", [TURNS + PROMPT, MARKED], ids=["by beginnings", "marked"])
def test_the_answers_of_a_chat_are_learned_with_their_ends(tmp_path: Path, template: str) -> None:
    tokenizer = saved(tmp_path, template)
    assert learned(tokenizer, CHAT) == ["Good day<|end|>", "Well<|end|>"]
    ids, marks = encode_chat(tokenizer, CHAT, False, "here")
    assert all(marks)
    assert ids == tokenizer.of_transformers.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    assert tokenizer.of_transformers.decode(ids) == tokenizer.of_transformers.apply_chat_template(CHAT, tokenize=False)


def test_what_cannot_be_told_is_refused(tmp_path: Path) -> None:
    trimmed = TURNS.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:3] }}") + PROMPT
    with pytest.raises(UsageError, match=r"here: which tokens are the answer of message 1 cannot be told"):
        learned(saved(tmp_path / "trimmed", trimmed), CHAT)
    across = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    across += "{% if add_generation_prompt %}assistant: {% endif %}"
    with pytest.raises(UsageError, match=r"the token ' Good' lies across the edge of an answer"):
        learned(saved(tmp_path / "across", across), CHAT)
    refusing = TURNS + "{{ raise_exception('users first') }}"
    with pytest.raises(UsageError, match=r"the chat template of .* does not take this chat: users first"):
        learned(saved(tmp_path / "refusing", refusing), CHAT)
    tokenizer = saved(tmp_path / "good", TURNS + PROMPT)
    for messages, words in (([], "an empty list"), ("a", "a str"), ([{"role": "user"}], "message 0 is")):
        with pytest.raises(UsageError, match=words):
            encode_chat(tokenizer, messages, True, "here")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "assistant", "content": None}, "here: the content of message 1 is null; it takes a text"),
        ({"role": "assistant", "content": 4}, "here: the content of message 1 is a int"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "the chat template does not mention tool_calls"),
        ({"from": "gpt", "value": "Well"}, r"must be rewritten: \{.messages"),
    ],
)
def test_a_content_that_is_no_text_is_refused(tmp_path: Path, message: dict[str, Any], words: str) -> None:
    tokenizer = saved(tmp_path, TURNS + PROMPT)
    for answers in (True, False):
        with pytest.raises(UsageError, match=words):
            encode_chat(tokenizer, [CHAT[0], message], answers, "here")


def test_a_template_that_knows_tool_calls_decides_about_them(tmp_path: Path) -> None:
    template = TURNS.replace("{{ m.content }}", "{{ m.content or m.tool_calls[0] }}") + PROMPT
    calling = {"role": "assistant", "content": None, "tool_calls": ["Well"]}
    assert "Well" in learned(saved(tmp_path, template), [CHAT[0], calling])[0]
