"""`penstock studio`: a file, or served on loopback."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.schedule import build


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(command: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == code, result.output
    return result


def test_a_file_is_written() -> None:
    assert call("studio --out studio.html").stdout == "saved to studio.html\n"
    assert Path("studio.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_it_begins_with_families_and_files() -> None:
    build("1f1b", 3, 5).save("mine.csv")
    call("studio mine.csv ZBV --out a.html")
    text = Path("a.html").read_text(encoding="utf-8")
    assert '"begin":"r=3\\u0026m=5\\u0026a=own' in text
    assert "\\u0026b=zb-v\\u0026" in text
    call("studio zb-h1 --ranks 6 --out a.html")
    assert '"begin":"r=6\\u0026m=12\\u0026a=zb-h1\\u0026av=1"' in Path("a.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("studio 1f1b zb-v gpipe", "two schedules side by side, not 3"),
        ("studio nowhere.csv", "there is no file nowhere.csv"),
        ("studio zbv2", "did you mean zb-v?"),
        ("studio --out nowhere/a.html", "nowhere/a.html"),
        ("studio --port -1", "give 0 or more"),
        ("studio --port 99999", "port 99999 cannot be had"),
        ("studio 1f1b --ranks 300", "at most 256 ranks, not 300"),
        ("studio large.csv", "at most 40,000 stages times microbatches, not 41,000"),
    ],
)
def test_what_cannot_work_is_said(command: str, words: str) -> None:
    if "large" in command:
        build("1f1b", 41, 1000).save("large.csv")
    assert words in call(command, 2).stderr


def test_it_is_served_on_this_machine_until_ctrl_c() -> None:
    command = [Path(sys.executable).parent / "penstock", "studio"]
    fetch = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())
            assert found is not None
            with fetch(found[0], timeout=30) as answer:
                assert b"Penstock studio" in answer.read()
            with pytest.raises(urllib.error.HTTPError, match="404") as refused:
                fetch(f"{found[0]}etc/passwd", timeout=30)
            refused.value.close()
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0
        finally:
            server.kill()


def test_a_port_that_is_taken_is_named() -> None:
    """It was called a file."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} cannot be had" in call(f"studio --port {port}", 2).stderr
