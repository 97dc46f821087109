"""Tokenizers of local files and folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_tokenizers import fast, saved

from penstock.errors import UsageError
from penstock.tools.train.build import build_model, gpt_options
from penstock.tools.train.config.read import load_config
from penstock.tools.train.data.batches import open_data
from penstock.tools.train.data.checks import check_vocabulary
from penstock.tools.train.data.tokenizer import Tokenizer


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
