"""`penstock studio`: a file, or served on loopback."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
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


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Serve a page of 2 MB to clients that have a second."""
    code = "from penstock.cli.schedules import studio; studio.LONGEST = 1.0; studio.serve('page ' * 400_000, 0)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        found = re.search(r":(\d+)/", server.stdout.readline())
        assert found is not None
        yield int(found[1])
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=30)
        assert (server.returncode, errors) == (0, ""), "a client made it write a traceback"


def ask(port: int, request: bytes) -> bytes:
    """Return all that the server sends, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(request)
        answer = b""
        with suppress(ConnectionError):
            while piece := client.recv(1 << 16):
                answer += piece
        return answer


def test_it_answers_to_its_own_name_only(port: int) -> None:
    """A web page of somebody's, whose host name then means 127.0.0.1, could read what is served here."""
    good = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    assert ask(port, good).startswith(b"HTTP/1.0 200 OK")
    assert ask(port, good.replace(b"127.0.0.1", b"localhost")).startswith(b"HTTP/1.0 200 OK")
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port}\r\nHost: evil.example", ""):
        assert ask(port, f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()).startswith(b"HTTP/1.0 403"), host
    assert ask(port, b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 403")
    assert b"page page" not in ask(port, b"GET /\r\n")


def test_headers_without_end_and_other_requests_are_refused(port: int) -> None:
    assert b" 431 " in ask(port, b"GET / HTTP/1.1\r\n" + b"A: " + b"b" * 70_000 + b"\r\n")
    assert b" 431 " in ask(port, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n")
    assert b" 501 " in ask(port, b"POST / HTTP/1.1\r\nContent-Length: 100000000000\r\n\r\n")
    assert b"page page" not in ask(port, b"\x16\x03\x01\x00\xff\r\n\r\n")


def test_a_client_that_takes_its_time_is_left(port: int) -> None:
    """One that sends a byte now and then, and one that never reads, each had a thread for as long as they liked."""
    silent = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(8)]
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as slow, suppress(ConnectionError):
        while time.monotonic() - began < 20:
            slow.sendall(b"G")
            time.sleep(0.05)
    assert time.monotonic() - began < 15
    for client in silent:
        with client, suppress(ConnectionError):
            assert client.recv(1) == b""


def test_more_clients_than_it_serves_at_a_time_are_turned_away_and_it_recovers(port: int) -> None:
    clients = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(40)]
    for client in clients:
        with client, suppress(ConnectionError):
            assert client.recv(1) == b""
    deadline = time.monotonic() + 20
    while not ask(port, f"GET / HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n".encode()).startswith(b"HTTP/1.0 200 OK"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
