"""What a run proposes at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.tools.train.config.read import load_config
from penstock.tools.train.generation.codec import codec_of
from penstock.tools.train.run.closing import what_next


def test_a_run_on_chats_is_tried_with_a_question(tmp_path: Path) -> None:
    settings = ["model.source=huggingface:model", "data.source=chats.jsonl", f"data.tokenizer={tmp_path}"]
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tried, exported = what_next(load_config(None, settings), Path("my run"))
    assert tried.endswith("penstock generate 'my run' --prompt 'def '")
    assert exported.endswith("penstock checkpoint export 'my run' FOLDER")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    tried, _ = what_next(load_config(None, settings), Path("my run"))
    assert tried.endswith("penstock generate 'my run' --chat 'your question'")
    tried, _ = what_next(load_config(None, [*settings, "data.format=text"]), Path("my run"))
    assert "--prompt" in tried


def test_a_run_whose_tokens_mean_nothing_here_is_not_tried(tmp_path: Path) -> None:
    """Rows of input_ids without a tokenizer were taken for bytes, and `generate` failed at the first above 255."""
    settings = [f"model.source=huggingface:{tmp_path}", "data.source=rows.jsonl"]
    (exported,) = what_next(load_config(None, settings), Path("run"))
    assert exported.startswith("export")
    with pytest.raises(UsageError, match="rows held input_ids, and nothing says what these numbers mean"):
        codec_of(load_config(None, settings), None)
    (tmp_path / "tokenizer.json").write_text("{}")  # where a tokenizer lies beside the model, it is taken
    assert len(list(what_next(load_config(None, settings), Path("run")))) == 2
    assert list(what_next(load_config(None, ["data.tokens=uint16"]), Path("run"))) == []
    assert len(list(what_next(load_config(None, ["data.tokens=uint8"]), Path("run")))) == 1
