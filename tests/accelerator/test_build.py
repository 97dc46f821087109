"""The device is built once, by one of those who want it, and a killed build is in nobody's way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerator import build, harness


@pytest.fixture
def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a compiler that takes its time, notes that it ran, and makes a library of one line."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fake = (
        "import sys, time; from pathlib import Path; folder = Path(sys.argv[1]);"
        " (folder / 'lock').touch(exist_ok=False);"
        f" open({str(tmp_path / 'ran')!r}, 'a').write('once '); time.sleep(1.0);"
        f" (folder / {build.MODULE + '.so'!r}).write_text('a library'); (folder / 'lock').unlink()"
    )
    (tmp_path / "build.py").write_text(
        (Path(build.__file__).read_text()).replace(
            'program = [sys.executable, str(Path(__file__).resolve()), "--compile", str(folder)]',
            f"program = [sys.executable, '-c', {fake!r}, str(folder)]",
        )
    )
    assert repr(fake) in (tmp_path / "build.py").read_text()
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "one.cpp").write_text("")
    return tmp_path


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(folder / "build.py")], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def test_two_who_want_it_at_once_build_it_once(compiling: Path) -> None:
    found = [each.communicate()[0].strip() for each in (start(compiling), start(compiling))]
    assert found[0] == found[1]
    assert Path(found[0]).read_text() == "a library"
    assert (compiling / "ran").read_text() == "once "


def test_a_build_after_one_that_was_killed_does_not_wait_for_it(compiling: Path) -> None:
    """torch's own lock is a file, which a killed build leaves: the next one would wait for ever."""
    killed = start(compiling)
    while not (compiling / "ran").exists():
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert (compiling / "penstock-tests" / "accelerator" / "objects" / "lock").exists()
    assert Path(start(compiling).communicate(timeout=60)[0].strip()).read_text() == "a library"


def test_other_sources_are_another_build(compiling: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SOURCES", compiling / "device")
    before = build.library()
    (compiling / "device" / "one.cpp").write_text("// changed")
    assert build.library() != before


@pytest.mark.parametrize("ci", [False, True], ids=["at home", "in CI"])
def test_without_a_compiler_tests_are_skipped_by_name_but_not_in_ci(
    ci: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    if ci:
        monkeypatch.setenv("CI", "true")
    else:
        monkeypatch.delenv("CI", raising=False)
    expected = build.CannotBuildError if ci else pytest.skip.Exception
    with pytest.raises(expected, match="no-such-compiler not found"):
        harness.require_device()
