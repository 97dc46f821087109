"""`penstock doctor` on this machine's CPU, as a user would call it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.planner.cluster import Cluster

pytestmark = pytest.mark.slow


def test_it_examines_the_cpu_and_writes_all_that_is_known(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "doctor", "--families", "1f1b,zb-v", "--cluster", "here.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "penstock-doctor.json").read_text())
    outcomes = {each["check"]: each["outcome"] for each in document["findings"]}
    assert outcomes["1f1b on 2"] == outcomes["zb-v on 2"] == outcomes["threads"] == outcomes["a killed rank"] == "PASS"
    assert {"host reads", "products", "links", "overlap"} < set(outcomes)
    for check, outcome in outcomes.items():
        assert f"  {outcome}  {check}" in done.stdout
    assert Cluster.load(tmp_path / "here.toml").inside.bandwidth > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--families", "zbv2"], "zbv2"),
        (["--families", "forward-only"], "has no backward"),
        (["--ranks", "1"], "--ranks"),
        (["--ranks", "100000"], "enough for"),
        (["--out", "/nowhere/found.json"], "there is no folder /nowhere"),
        (["--cluster", "/nowhere/here.toml"], "there is no folder /nowhere"),
        (["--out", "/tmp"], "/tmp is a folder"),
    ],
)
def test_what_cannot_be_examined_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 2
    assert message in result.output
