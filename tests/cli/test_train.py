"""`penstock train`: what it refuses and shows before it trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import app


def test_a_dry_run_of_somebody_elses_configuration_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", "model.source=theirs:build", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "model.source = 'theirs:build'" in result.output
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("option", [[], ["model.options.trust_remote_code=true"]])
def test_nor_does_it_run_the_code_of_a_models_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}')
    (folder / "theirs.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", "model.source=huggingface:theirs", "--dry-run", *option])
    assert result.exit_code == 2
    assert "code from a model's folder is not run" in result.output
    assert not (tmp_path / "ran").exists()
