"""`penstock primer`: the list, the drawing, and what it says to a learner who mistypes or breaks something."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.cli import app

COMMAND = str(Path(sysconfig.get_path("scripts")) / "penstock")


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, ["primer", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_without_a_name_all_programs_are_listed_in_order() -> None:
    lines = run().stdout.splitlines()
    assert lines[0].split()[:2] == ["1", "send-recv"]
    assert lines[6].startswith(" 7  all-reduce        a reduce of which every rank gets the result")
    entries = json.loads(run("--json").stdout)
    assert len(entries) == 22
    assert all(Path(entry["path"]).is_file() for entry in entries)


@pytest.mark.parametrize("name", ["all-gather", "ALL_GATHER", "6", "06", "06_all_gather", "06_all_gather.py"])
def test_a_program_answers_to_name_number_and_file(name: str) -> None:
    assert run(name, "--source").stdout.startswith('"""all-gather: ')


def test_a_copy_in_this_folder_is_meant_before_the_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "06_all_gather.py").write_text('"""mine"""\n')
    assert run("06_all_gather.py", "--source").stdout == '"""mine"""\n'
    assert run("06_all_gather", "--source").stdout.startswith('"""all-gather: ')


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("gathr", "did you mean gather or all-gather"),
        ("all-reduse", "did you mean all-reduce"),
        ("pipelines", "did you mean pipeline"),
        ("23", "it has: send-recv, broadcast"),
        ("nowhere/02_broadcast.py", "there is no file nowhere/02_broadcast.py"),
        ("--ranks 3", "--ranks needs a program's name"),
        ("--source", "--source needs a program's name"),
        ("ring --copy here", "leave the name out"),
        ("ring --ranks 0", "0 is too small"),
    ],
)
def test_bad_usage_says_what_would_work(arguments: str, said: str) -> None:
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_copied_program_runs_is_drawn_and_a_broken_one_tells_which_rank_and_line(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert "22 programs in" in run("--copy", folder).stdout
    assert "exists already" in run("--copy", folder).stderr
    good = subprocess.run(
        [COMMAND, "primer", str(folder / "02_broadcast.py"), "--ranks", "3"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=500,
    )
    assert good.returncode == 0, good.stderr
    assert "o---->|---->|     [3, 1, 4]\n" in good.stdout
    assert good.stdout.endswith("check: every rank holds the root's tensor\n")

    path = folder / "02_broadcast.py"
    path.write_text(path.read_text().replace("torch.tensor([3, 1, 4])", "torch.tensor([3, 1, 5])"))
    bad = subprocess.run([COMMAND, "primer", str(path), "--json"], capture_output=True, text=True, timeout=500)
    assert bad.returncode == 1
    document = json.loads(bad.stdout)
    assert document["exit_code"] == 1
    assert {"from": 0, "to": [1, 2, 3], "text": "[3, 1, 5]"} in document["events"]
    assert "AssertionError" in bad.stderr
    assert "assert tensor.tolist() == [3, 1, 4]" in bad.stderr
