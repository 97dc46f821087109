"""Where README.md or docs/command.md shows what the command prints, it prints that."""

import contextlib
import io
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from test_docs import ROOT, find_blocks


@pytest.mark.parametrize("name", ["README.md", "docs/command.md"])
def test_shown_output_is_what_is_printed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    namespace: dict[str, object] = {}
    compared = 0
    for block in find_blocks((ROOT / name).read_text(encoding="utf-8")):
        if not block.is_run:
            continue
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(block.text, namespace)
            continue
        for part in block.text.split("$ ")[1:]:
            command, _, shown = part.partition("\n")
            done = subprocess.run(
                ["bash", "-c", command],
                env={**os.environ, "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=60,
            )
            if shown:
                compared += 1
                assert done.stdout == shown, command
    assert compared >= 2
