"""The files around the code say what is so: they name files and families that exist, and run what `make` runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.schedule import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
TOPS = [ROOT / name for name in ("src", "tests", "bench", "docs")]
FILES = [f"/{path.relative_to(ROOT).as_posix()}" for top in TOPS for path in top.rglob("*.py")]
FOLDERS = {f"{path.rpartition('/')[0]}/" for path in FILES}


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_and_folders_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    files, folders = re.findall(r"`([\w./-]+\.py)`", text), re.findall(r"`(?:src/penstock/)?([a-z_/]+/)`", text)
    assert len(files) > 5
    assert [name for name in files if not any(path.endswith(f"/{name}") for path in FILES)] == []
    strange = [name for name in folders if not any(path.endswith(f"/{name}") for path in FOLDERS)]
    assert [name for name in strange if not (ROOT / name).is_dir()] == []


def test_every_family_is_cited() -> None:
    notes = re.findall(r"notes: (.*)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    cited = {word for note in notes for word in re.findall(r"[\w-]+", note)}
    assert set(FAMILIES) - cited == {"forward-only"}


def test_the_workflow_runs_the_check_and_commits_run_the_linters() -> None:
    assert "run: .ci/run" in (ROOT / ".github/workflows/check.yml").read_text(encoding="utf-8")
    assert "make test-fast test-slow" in (ROOT / ".ci/run").read_text(encoding="utf-8")
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    lint = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nlint:")[2].partition("\n\n")[0]
    for command in re.findall(r"\$\(BIN\)/(\w+(?: check| format| tests/\w+\.py)?)", lint):
        assert f"entry: .venv/bin/{command}" in hooks, command
