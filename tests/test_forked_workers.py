"""`pytest --workers`: forks run the tests, and what comes of them is reported as if one process had run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
HOOKS = "from forked_workers import pytest_addoption, pytest_runtestloop"
KEPT = """
import os, pytest

@pytest.fixture(scope="module")
def first(): return os.getpid()

@pytest.mark.parametrize("number", range(4))
def test_in_the_same_process(first, number): assert os.getpid() == first
"""
DYING = """
import os, pytest

def test_before(): pass
def test_that_dies(): os._exit(9)
def test_after(): print("as it was"); assert 1 + 1 == 3
def test_skipped(): pytest.skip("for a reason")
"""
MET = """
import time
from pathlib import Path

def test_that_waits_for_another_worker():
    while not Path("met").exists(): time.sleep(0.01)

def test_between(): pass
def test_also_between(): pass
def test_that_it_waits_for(): Path("met").touch()
"""


def pytest_in(folder: Path, *options: str, **files: str) -> tuple[int, str]:
    """Run pytest on files of tests, by two forked workers."""
    (folder / "conftest.py").write_text(HOOKS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "--workers", "2", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    ended = subprocess.run([*command, *options], cwd=folder, env=environment, capture_output=True, text=True)
    return ended.returncode, ended.stdout


def test_a_file_stays_together_and_a_worker_that_dies_fails_its_test_alone(tmp_path: Path) -> None:
    code, text = pytest_in(tmp_path, "-rs", kept=KEPT, dying=DYING)
    assert code == 1
    assert "2 failed, 5 passed, 1 skipped" in text
    assert "the worker that ran this test ended in its midst, with 9" in text
    assert "assert (1 + 1) == 3" in text
    assert "as it was" in text
    assert "for a reason" in text
    assert "[100%]" in text


def test_the_first_failure_ends_the_run_where_that_is_asked_for(tmp_path: Path) -> None:
    endless = "import time\ndef test_it():\n    while True: time.sleep(1)\n"
    code, text = pytest_in(tmp_path, "-x", failing="def test_it(): assert False", endless=endless)
    assert code == 1
    assert "1 failed" in text


def test_a_worker_without_a_file_takes_over_tests_of_another(tmp_path: Path) -> None:
    code, text = pytest_in(tmp_path, "--share-files", met=MET)
    assert code == 0, text
    assert "4 passed" in text
