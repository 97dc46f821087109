"""The benches run: each prints its table and ends well. How fast anything is here says nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"

TITLES = {
    "overhead.py": ["Linear(8, 8), 2 gloo ranks", "one process, nothing sent"],
    "composition.py": ["pp=2 x dp=2: transformer blocks"],
    "throughput.py": ["transformer blocks", "large messages, little compute", "ranks as threads of one process"],
}


@pytest.mark.slow
def test_the_bench_of_checkpoints_prints_its_table(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "checkpoint.py"), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = [line.split("  ")[0] for line in done.stdout.splitlines() if line]
    assert {"ours, async", "ours, sync", "torch.save", "DCP, async", "DCP, sync"} <= set(rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "overhead.py" else pytest.mark.exhaustive)
        for name in TITLES
    ],
)
def test_a_bench_prints_its_tables_in_quick_mode(name: str) -> None:
    command = [sys.executable, str(BENCH / name), "--quick", "--schedules", "1f1b,zb-v"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    for title in TITLES[name]:
        assert title in done.stdout
    rows = [line.split()[0] for line in done.stdout.splitlines() if line]
    assert {"1f1b", "zb-v"} <= set(rows)
