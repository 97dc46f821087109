"""What a run proposes at its end."""

from __future__ import annotations

from pathlib import Path

from penstock.train.config.read import load_config
from penstock.train.run.closing import what_next


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
