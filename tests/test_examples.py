"""Every program in examples/ runs as it is, in its own process; what it claims, it asserts itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import slow_if

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
LONG = ("changing_graph", "mixed_precision", "overlap_moe", "variable_length_text")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=slow_if(path.stem not in LONG)) for path in EXAMPLES],
)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(path)]
    result = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr


def test_there_are_examples() -> None:
    assert EXAMPLES
