"""examples/finetune_llama.py: trains, goes on where it stopped, and ends as the run that never stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_llama.py"


def run(folder: Path, steps: int, *launcher: str) -> str:
    command = [*(launcher or (sys.executable,)), str(EXAMPLE), str(steps)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_it_resumes_where_it_stopped(tmp_path: Path) -> None:
    (line,) = run(tmp_path, 10).splitlines()
    assert line.startswith("step 10  loss ")
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "4"]
    (later,) = run(tmp_path, 20, *torchrun).splitlines()
    assert later.startswith("step 20  loss ")
    assert float(later.split()[3]) < float(line.split()[3])


def test_its_code_is_short() -> None:
    code = EXAMPLE.read_text().split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 45
