"""bench/schedules.py runs: a smoke run at small sizes, with torch beside it."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "schedules.py"


@pytest.mark.slow
def test_the_schedule_bench_runs_and_reports_its_goals() -> None:
    result = subprocess.run([sys.executable, BENCH, "--quick"], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert "torch / ours" in result.stdout
    assert result.stdout.count("(goal: at most") == 4
