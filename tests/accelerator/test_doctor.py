"""`penstock doctor` examines the pretended device as it would a user's: by processes that it starts itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.planner.cluster import Cluster

TESTS = Path(__file__).resolve().parents[1]
DEVICE = f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nfrom accelerator import pretend\n"  # before torch, in each


@pytest.mark.slow
def test_every_check_is_made_on_devices_and_none_fails(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(DEVICE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PRETEND_NAME": "pretend"}
    command = [sys.executable, "-m", "penstock", "doctor", "--ranks", "2", "--families", "1f1b,zb-v", "--json"]
    command += ["--cluster", "here.toml"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["machine"]["kind"] == "pretend"
    outcomes = {each["check"]: each["outcome"] for each in document["findings"]}
    right = ["1f1b on 2", "zb-v on 2", "1f1b on 2, device_id=", "zb-v on 2, device_id=", "threads", "a killed rank"]
    assert [check for check in [*right, "host reads"] if outcomes[check] != "PASS"] == []
    assert {"products", "links", "overlap"} < set(outcomes)
    cluster = Cluster.load(tmp_path / "here.toml")  # as `penstock plan` reads it
    assert (cluster.devices, cluster.device.memory) == (2, 8 << 30)
