"""Tokenizers of local files and folders, and chats with loss on the answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.tools.train.build import build_model, gpt_options
from penstock.tools.train.config.read import load_config
from penstock.tools.train.data.batches import open_data
from penstock.tools.train.data.chat import encode_chat
from penstock.tools.train.data.checks import check_vocabulary
from penstock.tools.train.data.documents import Encoder
from penstock.tools.train.data.records import JsonLines, Record, RowPlace
from penstock.tools.train.data.tokenizer import Tokenizer, open_tokenizer
from penstock.tools.train.generation.codec import ByteCodec, TokenizerCodec

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}" + PROMPT
)
CHAT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Good day"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Well"},
]


def fast() -> Any:
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = Fast(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        ["Hello Good day Bye Well: "] * 3,
        trainers.BpeTrainer(
            vocab_size=290,
            special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return made


def saved(folder: Path, template: str | None) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=fast(), eos_token="<|end|>")
    made.chat_template = template
    made.save_pretrained(folder)
    return Tokenizer(str(folder))


def learned(tokenizer: Tokenizer, messages: Any) -> list[str]:
    """The pieces of a chat that are learned, whole."""
    ids, marks = encode_chat(tokenizer, messages, True, "here")
    pieces, before = [""], False
    for token, mark in zip(ids, marks, strict=True):
        pieces += [""] if mark and not before else []
        pieces[-1] += tokenizer.of_transformers.decode([token]) if mark else ""
        before = mark
    return pieces[1:]


def test_a_file_is_read_without_transformers(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    made = fast()
    made.enable_truncation(2)  # as some files have it: tokens would be lost without a word
    made.enable_padding(length=30)
    made.save(str(path))
    tokenizer = Tokenizer(str(path), "<|end|>")
    ids = tokenizer.encode("Hello")
    assert tokenizer.decode(next(tokenizer.encode_all(["Hello Good day"]))) == "Hello Good day"
    assert tokenizer.of_transformers is None
    assert tokenizer.decode(ids) == "Hello"
    assert tokenizer.ended(ids) == tokenizer.ended(tokenizer.ended(ids)) == [*ids, 0]
    assert tokenizer.begun([*ids, 0]) == ids
    assert Tokenizer(str(tmp_path)).end is None
    with pytest.raises(UsageError, match=r"data.end is 'nope', which the tokenizer"):
        Tokenizer(str(path), "nope")
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "bare").mkdir()
    with pytest.raises(UsageError, match=r"bare holds no tokenizer \(no tokenizer.json, tokenizer_config.json"):
        Tokenizer(str(tmp_path / "bare"))
    with pytest.raises(UsageError, match="is no file of a tokenizer"):
        Tokenizer(str(tmp_path / "bad.json"))
    with pytest.raises(UsageError, match="there is no folder or file"):
        Tokenizer(str(tmp_path / "gone"))


def test_text_and_the_built_in_gpt_follow_the_tokenizer(tmp_path: Path) -> None:
    path, text = tmp_path / "tokenizer.json", tmp_path / "a.txt"
    fast().save(str(path))
    text.write_text("Hello Good day\n" * 40)
    settings = [f"data.source={text}", f"data.tokenizer={path}", "data.end=<|end|>", "data.sequence=8"]
    config = load_config(None, settings)
    size = Tokenizer(str(path)).vocabulary
    assert gpt_options(config).vocabulary == size
    data = open_data(config)
    assert "Good" in Tokenizer(str(path)).decode(data.at(0).args[0][0].tolist())
    check_vocabulary(config, build_model(config)[0], data)
    small = load_config(None, [*settings, "model.options.vocabulary=20"])
    with pytest.raises(UsageError, match=f"has {size} tokens, the model knows 20"):
        check_vocabulary(small, build_model(small)[0], data)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 300]}\n')
    numbers = load_config(None, [f"data.source={rows}", "data.validation=0"])
    with pytest.raises(UsageError, match="hold the token 300; the model knows 256"):
        check_vocabulary(numbers, build_model(numbers)[0], open_data(numbers))
    rows.write_text('{"text": "abc"}\n')
    texts = [*settings, f"data.source={rows}", "data.validation=0"]
    fewer = load_config(None, [*texts, "model.options.vocabulary=20"])
    most = int(open_data(fewer)._tally.largest)  # type: ignore[attr-defined]
    assert most + 1 < size
    enough = load_config(None, [*texts, f"model.options.vocabulary={most + 1}"])
    check_vocabulary(enough, build_model(enough)[0], open_data(enough))  # a token of the tokenizer that no row has
    with pytest.raises(UsageError, match=f"hold the token {most}; the model knows 20"):
        check_vocabulary(fewer, build_model(fewer)[0], open_data(fewer))
    rows.write_text('{"input_ids": [1, 300]}\n')
    streamed = load_config(None, [f"data.source={rows}", "data.streaming=true"])
    later = open_data(streamed)
    check_vocabulary(streamed, build_model(streamed)[0], later)
    with pytest.raises(UsageError, match="hold the token 300"):
        later.at(0)


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


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_replacements_that_make_a_text_endless_are_refused(part: str, tmp_path: Path) -> None:
    """Six of them, each a letter by a hundred, filled the memory in Rust, which nothing interrupts."""
    fast().save(str(tmp_path / "tokenizer.json"))
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    bomb = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}] * 6
    document[part] = {"type": "Sequence", f"{part}s": bomb}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match="replaces letters by texts of more than 1,000 letters"):
        Tokenizer(str(tmp_path))


def test_code_in_a_tokenizers_folder_is_not_run(tmp_path: Path) -> None:
    saved(tmp_path, None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(UsageError, match="code from the folder is not run"):
        Tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()
