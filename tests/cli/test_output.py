"""What the command writes, and what it refuses to write."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest
from command import run

COMMAND = str(Path(sysconfig.get_path("scripts")) / "penstock")


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
