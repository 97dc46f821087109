"""`penstock bench`: the list, and a bench that is run as its own process, from a working copy and from a wheel."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiers import in_tiers
from typer.testing import CliRunner, Result

from penstock.cli import app

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["backward", "balance", "calibration", "checkpoint", "composition", "failures", "losses", "overhead", "page"]
NAMES += ["pairs", "plan", "schedules", "search", "soak", "throughput", "transport"]
ALONE = {"failures", "page", "soak"}  # measured against nobody

# Benches of the tests' own, which stand beside the real ones in a folder that is laid out as a wheel.
ECHO = '''"""What was given against what came."""
import json, os, sys, penstock
def main():
    print(json.dumps([sys.argv[1:], sys.executable, penstock.__file__]))
    if "--die" in sys.argv:
        os.kill(os.getpid(), 9)
    sys.exit(7)
main()
'''
STUCK = '''"""A process that waits, and one that it started."""
import signal, subprocess, tempfile, time
from report import bench
def main():
    with bench(__doc__, more=lambda parser: parser.add_argument("--deaf", action="store_true")) as settings:
        with tempfile.TemporaryDirectory(dir="."):
            child = subprocess.Popen(["sleep", "100"])
            print(child.pid, flush=True)
            if settings.deaf:
                signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
            while True:
                time.sleep(1)
main()
'''
NEEDY = '''"""What is there against what is not."""
import penstock.schedule
from needs import something
def main():
    import nowhere_installed.part as part
'''


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel installs, where pyproject.toml puts it; and the benches above."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel["only-include"]) == set(wheel["sources"])
    for source, target in wheel["sources"].items():
        shutil.copytree(ROOT / source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in {"echo": ECHO, "stuck": STUCK, "needy": NEEDY, "needs": "import torch, neither\n"}.items():
        (folder / "penstock" / "bench" / f"{name}.py").write_text(text)
    return folder


def command(installed: Path, *arguments: str) -> list[str]:
    """The command of that folder, which no other process would find there by itself; endlessly patient."""
    found = f"import sys; sys.path.insert(0, {str(installed)!r}); from penstock.cli import main, programs"
    return [sys.executable, "-c", f"{found}; programs.PATIENCE = 1000; main()", "bench", *arguments]


def call(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(installed, *arguments), capture_output=True, text=True, timeout=500)


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_without_a_name_all_benches_are_listed_in_a_line_each() -> None:
    result = run()
    assert result.exit_code == 0
    lines = result.stdout.partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    compared = [line for line in lines if line.split()[0] not in ALONE]
    assert all(any(word in line for word in ("against", "beside")) for line in compared)
    entries = json.loads(run("--json").stdout)
    assert [entry["name"] for entry in entries] == NAMES
    assert all(Path(entry["path"]) == ROOT / "bench" / f"{entry['name']}.py" for entry in entries)
    assert [entry["title"] for entry in entries] == [line.split(maxsplit=1)[1] for line in lines]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("overhed", "did you mean overhead?"),
        ("schedule --quick", "did you mean schedules?"),
        ("common", "penstock has no bench 'common'"),
        ("report", "did you mean transport or checkpoint?"),
        ("--quick overhead", "No such option: --quick"),
    ],
)
def test_bad_usage_says_what_would_work(arguments: str, said: str) -> None:
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_folder_without_benches_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["penstock.cli.bench"], "PLACES", (tmp_path,))
    result = run()
    assert result.exit_code == 2
    assert f"the benches are not where they should be: {tmp_path}; install penstock again" in result.stderr


@pytest.mark.slow
def test_options_go_to_the_bench_and_its_exit_code_comes_back(installed: Path) -> None:
    for given, came in [
        (["echo"], []),
        (["echo", "--help", "-h", "--json", "a b", "--", "--ranks", "3"], None),
        (["--json", "ECHO.py", "--quick"], ["--json", "--quick"]),
    ]:
        done = call(installed, *given)
        assert (done.returncode, done.stderr) == (7, "")
        expected = [given[1:] if came is None else came, sys.executable, str(installed / "penstock" / "__init__.py")]
        assert json.loads(done.stdout) == expected
    died = call(installed, "echo", "--die")
    assert died.returncode == 128 + signal.SIGKILL
    assert died.stderr == "penstock: the bench echo was ended by SIGKILL\n"


@pytest.mark.slow
def test_a_bench_that_needs_more_says_what_to_install(installed: Path) -> None:
    done = call(installed, "needy", "--quick")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the bench needy needs neither and nowhere_installed, which are not installed; run " in done.stderr
    assert done.stderr.endswith(" -m pip install neither nowhere_installed\n")


def test_what_penstock_declares_is_asked_for_in_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else True)
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["rich>=15", "torch>=2.13,<2.14; extra == 'x'"])
    result = run("overhead")
    assert result.exit_code == 2
    assert "the bench overhead needs torch, which is not installed; run " in result.stderr
    assert result.stderr.endswith(" -m pip install 'torch>=2.13,<2.14'\n")


@pytest.mark.exhaustive  # tests/test_primer.py runs one from a real wheel
def test_benches_run_from_where_a_wheel_puts_them(installed: Path) -> None:
    entries = json.loads(call(installed, "--json").stdout)
    assert {entry["name"] for entry in entries} >= {*NAMES, "echo"}
    assert all(Path(entry["path"]).parent == installed / "penstock" / "bench" for entry in entries)
    done = call(installed, "search", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    table, steady = json.loads(done.stdout)["tables"]
    caps = [row["memory"] for row in table["rows"]]
    assert caps == sorted(caps)
    assert len(caps) > 3
    assert all(row["lower bound"] <= row["makespan"] * (1 + 1e-9) for row in table["rows"])
    assert table["title"] in done.stderr
    assert steady["title"] in done.stderr


@contextmanager
def stuck(installed: Path, folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command while its bench waits, and the process that the bench has started."""
    with subprocess.Popen(
        command(installed, "stuck", *options), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    "number", in_tiers([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], [signal.SIGTERM], [signal.SIGHUP])
)
def test_a_bench_that_is_stopped_ends_with_its_processes_and_cleans_up(
    number: signal.Signals, installed: Path, tmp_path: Path
) -> None:
    with stuck(installed, tmp_path) as (process, child):
        assert is_running(child)
        assert len(os.listdir(tmp_path)) == 1
        process.send_signal(number)
        said, complaints = process.communicate(timeout=500)
        assert process.returncode == 128 + number
        assert (said, complaints) == ("", "")
        assert not is_running(child)
        assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_bench_that_does_not_listen_ends_at_the_second_ctrl_c(installed: Path, tmp_path: Path) -> None:
    with stuck(installed, tmp_path, "--deaf") as (process, child):
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "no\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=500)
        assert process.returncode == 130
        assert not is_running(child)


def test_help_of_the_command_is_not_that_of_a_bench() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "Usage: penstock bench [OPTIONS] [NAME] [OPTION]..." in result.stdout
