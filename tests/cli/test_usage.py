"""Bad usage ends with 2 and one paragraph; the real command behaves in pipes and on terminals."""

import os
import pty
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock
from penstock.cli import app

COMMAND = str(Path(sysconfig.get_path("scripts")) / "penstock")

BAD_USAGE = {
    "train nowhere.toml": "there is no configuration nowhere.toml",
    "train a.toml b.toml": "a.toml and b.toml are two configurations",
    "train --resume --fresh": "give one of them",
    "train training.step=3": "did you mean training.steps?",
    "train output=/proc/nowhere": "where nothing can be written",
    "train output=nowhere --resume": "has no run to go on from",
    "eval output=nowhere": "there is no nowhere; give a run's folder",
    "generate nowhere": "there is no nowhere; give a run's folder",
    "generate nowhere --temperature hot": "'hot' is not a number",
    "generate nowhere --prompt a --chat b": "give one of them",
    "generate nowhere --tokens 0": "0 is too small",
    "show zbv2": "did you mean zb-v?",
    "show": "Missing argument",
    "show schedule.txt": ".csv or .json",
    "show nowhere.csv": "there is no file nowhere.csv",
    "show folder/": "ends in .csv or .json",
    "show 1f1b --ranks 0": "0 is too small; give 1 or more",
    "show 1f1b --ranks four": "'four' is not a whole number",
    "show 1f1b --ranks 1000000000": "15,000,000 are the most",
    "show zb-v --stages-per-rank 3": "zb-v has 2 stages on each rank",
    "show 1f1b --width 3": "give 20 or more",
    "show 1f1b --save x.txt": ".csv or .json",
    "show 1f1b --save nowhere/x.csv": "nowhere/x.csv",
    "show 1f1b --color": "--color",
    "verify 1f1b --microbatches -1": "-1 is too small",
    "simulate 1f1b --forward fast": "--forward: 'fast' is not a number",
    "simulate 1f1b --forward 1,2": "--forward has 2 numbers for 4 stages",
    "simulate 1f1b --weight nan": "--weight: nan does not work here",
    "simulate 1f1b --hop inf": "--hop: inf does not work here",
    "simulate 1f1b --hop 1 --latency 1": "not both",
    "simulate 1f1b --bytes 5": "--bytes needs --bandwidth",
    "simulate 1f1b --bandwidth 0": "bandwidth must be above 0",
    "simulate 1f1b --jitter -1": "--jitter: -1",
    "simulate 1f1b --draws 0": "0 is too small",
    "compare --hop x": "--hop: 'x' is not a number",
    "dance": "No such command 'dance'",
}


@pytest.mark.parametrize("command", BAD_USAGE)
def test_bad_usage_exits_with_2_and_says_what_would_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert result.stderr.startswith("penstock: ")
    assert result.stderr.count("\n") == 1
    assert BAD_USAGE[command] in result.stderr


def test_help_has_examples_and_every_command() -> None:
    for arguments in ([], ["--help"], ["-h"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0
        assert "penstock show zb-v --ranks 4 --microbatches 8" in result.stdout
        for command in ("show", "verify", "simulate", "compare", "primer", "bench"):
            assert f"\n  {command} " in result.stdout


# through the console script


def call(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command.replace("penstock", COMMAND, 1)],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_the_installed_command_knows_its_version() -> None:
    assert call("penstock --version").stdout == f"penstock {penstock.__version__}\n"


def test_the_command_does_not_import_torch() -> None:
    code = "import sys, penstock.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=500).returncode == 0


@pytest.mark.slow
def test_a_reader_that_stops_early_is_no_error() -> None:
    result = call("penstock show gpipe --ranks 64 --microbatches 256 | head -2")
    assert (result.returncode, result.stderr) == (0, "")
    assert len(result.stdout.splitlines()) == 2


@pytest.mark.slow
def test_a_reader_that_stops_early_does_not_hide_faults(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0F0,0B1\n")
    result = call(f"penstock verify {path} | head -0")
    assert (result.returncode, result.stderr) == (1, "")


def test_a_pipe_that_takes_only_ascii_is_fine() -> None:
    result = call("penstock compare", PYTHONIOENCODING="ascii")
    assert result.returncode == 0
    assert result.stdout.isascii()
    assert "interleaved-1f1b" in result.stdout


def on_terminal(columns: int, arguments: list[str], **environment: str) -> str:
    """What the command writes to a terminal of so many columns."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [COMMAND, *arguments],
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), **environment},
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=subprocess.DEVNULL,
    )
    os.close(follower)
    written = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not piece:
            break
        written += piece
    os.close(leader)
    assert process.wait(timeout=500) == 0
    return written.decode().replace("\r\n", "\n")


@pytest.mark.slow
def test_a_terminal_gets_colours_and_its_own_width() -> None:
    assert "\x1b[34m0F0" in on_terminal(60, ["show", "1f1b"])
    plain = on_terminal(60, ["show", "1f1b"], NO_COLOR="1")
    assert "\x1b" not in plain
    assert all(len(line) <= 60 for line in plain.splitlines())


@pytest.mark.slow
def test_the_table_fits_a_narrow_terminal_with_nothing_cut() -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(60, ["compare"]))
    assert all(len(line) <= 60 for line in text.splitlines()), text
    assert "activations" in text
    for name in ("interleaved-1f1b", "forward-only"):
        assert any(line.split()[:1] == [name] for line in text.splitlines())
