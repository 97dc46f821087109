"""Programs that come with Penstock: found, named, and ended with all that they have started."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from deadlines import SOON

from penstock.cli.programs import find_folder, started, title_of, unknown
from penstock.errors import UsageError

WAITS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
child.wait()
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_nobody_is_left_when_the_context_is_left_by_an_error() -> None:
    children: list[int] = []
    with suppress(InterruptedError), started([sys.executable, "-c", WAITS], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        children.append(int(program.stdout.readline()))
        assert is_running(children[0])
        raise InterruptedError
    assert not is_running(program.pid)
    end = time.monotonic() + SOON  # killed with its group; that takes a moment on a busy machine
    while is_running(children[0]) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_running(children[0])


def test_a_folder_is_found_by_a_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mark.py").write_text('"""What it shows.\n\nMore.\n"""')
    assert find_folder([tmp_path / "nowhere", tmp_path / "there"], "mark.py", "programs") == tmp_path / "there"
    assert title_of(tmp_path / "there" / "mark.py") == "What it shows."
    with pytest.raises(UsageError, match=r"programs are not where they should be: .*nowhere; install penstock again"):
        find_folder([tmp_path / "nowhere"], "mark.py", "programs")


def test_the_nearest_names_are_offered() -> None:
    assert str(unknown("penstock", "bench", "over_head", ["overhead", "memory"])) == (
        "penstock has no bench 'over_head'; did you mean overhead? (it has: overhead, memory)"
    )
