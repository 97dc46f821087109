"""Every program in examples/ runs as it is, in its own process; what it claims, it asserts itself."""

import os
import subprocess
from pathlib import Path

import pytest
from tiers import slow_if
from warm import warm_commands

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
LONG = ("changing_graph", "mixed_precision", "overlap_moe", "variable_length_text")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=slow_if(path.stem not in LONG)) for path in EXAMPLES],
)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    command = [str(warm_commands() / "python"), "-W", "error", str(path)]
    result = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr


def test_there_are_examples() -> None:
    assert EXAMPLES
