"""Files and folders that a configuration names and that are not there: all are found before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.errors import UsageError
from penstock.tools.train.config.paths import check_paths
from penstock.tools.train.config.read import load_config


def faults(*settings: str) -> str:
    with pytest.raises(UsageError) as caught:
        check_paths(load_config(None, list(settings)))
    return str(caught.value)


def test_all_wrong_paths_are_listed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [
        "data.source=no.jsonl",
        "data.tokenizer=nowhere",
        "data.validation_source=no/*.jsonl",
        "lora.adapter=no",
    ]
    done = CliRunner().invoke(app, ["train", "output=run", "model.source=huggingface:./modle", *settings])
    assert done.exit_code == 2
    for words in (
        "data.source: 'no.jsonl' matches no file",
        "data.validation_source: 'no/*.jsonl' matches no file",
        'data.tokenizer: there is no folder or file "nowhere"',
        'model.source: there is no folder "modle" with a config.json',
        "lora.adapter: there is no folder no",
    ):
        assert words in " ".join(done.output.split())
    assert not (tmp_path / "run").exists()


def test_a_folder_of_a_model_must_have_a_configuration_and_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "my-model"
    model.mkdir()
    assert "name a folder after it" in faults("model.source=huggingface:")
    assert "the folder my-model has no config.json" in faults("model.source=huggingface:my-model")
    (model / "config.json").write_text("{}")
    assert "near: my-model" in faults("model.source=huggingface:my-modle")
    assert "has neither model.safetensors nor" in faults("model.source=huggingface:my-model")
    (model / "pytorch_model.bin").write_text("")
    assert "has its weights in pytorch_model.bin, and only safetensors" in faults("model.source=huggingface:my-model")
    check_paths(load_config(None, ["model.source=huggingface:my-model", "model.init=random"]))


def test_names_of_configurations_and_functions_are_left_alone() -> None:
    for source in ("huggingface:llama", "huggingface:llama4_text", "my_models:build", "gpt"):
        check_paths(load_config(None, [f"model.source={source}"]))
    assert "is written" in faults("model.source=my-models:build")


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("")
    assert "none.jsonl is empty (0 bytes)" in faults(f"data.source={tmp_path / 'none.jsonl'}")
