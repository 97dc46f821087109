"""The command says what it did with a file, and what it could not do."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.cli import app
from penstock.schedule import build, insert_reductions, insert_shards

COMMAND = str(Path(sysconfig.get_path("scripts")) / "penstock")


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Sharding and reductions, but no transfers."""
    insert_shards(insert_reductions(build("1f1b", 2, 2)), 1).save(tmp_path / "sharded.json")
    return tmp_path / "sharded.json"


def test_a_sharded_file_without_transfers_is_not_shown_as_if_it_were_lowered(sharded: Path) -> None:
    result = run("show", sharded, "--lowered")
    assert result.exit_code == 2
    assert "has reductions and shards but no transfers, and lowering starts from computes alone" in result.stderr
    assert run("show", sharded).exit_code == 0


def test_the_proof_of_a_sharded_file_without_transfers_says_what_was_proved(sharded: Path) -> None:
    result = run("verify", sharded)
    assert result.exit_code == 0
    assert "8 transfers added here: 4 messages" in result.stdout
    assert "6 sharding actions: each stage is whole when it computes" in result.stdout
    assert "sharding but no transfers: they were added to its computes alone" in result.stdout
    assert json.loads(run("verify", sharded, "--json").stdout)["sharding"] == 6


def test_a_full_disk_is_named_by_the_stream_that_met_it() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([COMMAND, "show", "1f1b"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "penstock: stdout: No space left on device\n")


@pytest.mark.parametrize(
    "line",
    ["simulate 1f1b --forward 1e308 --json", "simulate 1f1b --activation 1e308", "compare --weight 1e308 --json"],
)
def test_numbers_that_overflow_are_refused_and_never_printed(line: str) -> None:
    result = run(*line.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert "too large to be added up" in result.stderr


def test_auto_is_shown_as_build_makes_it() -> None:
    result = run("show", "auto", "--ranks", 2, "--microbatches", 3, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    wanted = build("auto", 2, 3)
    assert document["placement"] == list(wanted.placement)
    assert document["rows"] == [[action and str(action) for action in row] for row in wanted.rows]
