"""What torch reads from the environment is set before it is loaded, and what the user has set stays."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.tools.train.launch.environment import WANTED, prepare_environment


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    prepare_environment()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert os.environ.pop("TORCH_CPP_LOG_LEVEL") == WANTED["TORCH_CPP_LOG_LEVEL"]


def test_the_command_sets_it_before_torch_is_loaded() -> None:
    """Threads that wait for each other kept their cores, so that a run with one rank stood nearly still beside others:
    a setting that comes after torch is read by nobody."""
    probe = (
        "import sys, penstock.cli\n"
        "it = sys.modules['penstock.cli.train']\n"
        "it.prepare_environment = lambda: print('torch' in sys.modules)\n"
        "try: it.train(items=['nowhere.toml'])\n"
        "except BaseException: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=500)
    assert done.stdout.split()[:1] == ["False"], done.stderr
