"""Files as the source of a schedule: refused where they hold another, or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import run

from penstock.schedule import build


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--ranks", 3, "rank 2: has no row in the file"),
        ("--microbatches", 3, "the file is for 2 microbatches, not 3"),
        ("--stages-per-rank", 2, "1 stag"),
    ],
)
def test_a_file_for_other_sizes_is_refused(option: str, value: int, said: str, tmp_path: Path) -> None:
    build("1f1b", 2, 2).save(tmp_path / "file.csv")
    result = run("verify", tmp_path / "file.csv", option, value)
    assert result.exit_code == 1
    assert said in result.stdout


@pytest.mark.parametrize("command", ["show", "verify", "simulate"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b""),
        ("a.csv", b"\xff\xfe\x00"),
        ("a.csv", b"hello,world"),
        ("a.csv", b"0F0,0B0,999999999F0"),
        ("a.csv", b"0F" + b"9" * 5000),
        ("a.csv", b"a" * 200_000),
        ("a.json", b"{"),
        ("a.json", b"[" * 100_000),
        ("a.json", b'{"penstock_schedule": 1}'),
        ("a.json", json.dumps({**json.loads(run("show", "1f1b", "--json").stdout), "placement": [0, 7]}).encode()),
        ("a.json", json.dumps({**json.loads(run("show", "1f1b", "--json").stdout), "microbatches": 10**12}).encode()),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value[:20]),
)
def test_a_file_that_is_no_schedule_exits_with_1(command: str, name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    result = run(command, tmp_path / name)
    assert result.exit_code == 1
    assert "fault" in result.output
    as_json = run(command, tmp_path / name, "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["faults"][0]["message"]
