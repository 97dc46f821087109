"""A script for torch's pipelining, run by torchrun with torch's and with Penstock's: the losses are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

SCRIPT = Path(__file__).parent.parent / "trains_with.py"


def losses_with(library: str, folder: Path) -> list[dict[str, Any]]:
    file = folder / f"{library}.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(SCRIPT), library, str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


@pytest.mark.slow
def test_only_the_import_differs_and_the_losses_do_not(tmp_path: Path) -> None:
    theirs = losses_with("torch.distributed.pipelining", tmp_path)
    ours = losses_with("penstock.compat.pipelining", tmp_path)
    assert [list(rank) for rank in ours] == [list(rank) for rank in theirs]
    for their, our in zip(theirs, ours, strict=True):
        for name, steps in their.items():
            assert our[name] == [pytest.approx(losses, rel=1e-12) for losses in steps], name
    assert sorted(len(each) for rank in ours for steps in rank.values() for each in steps) == [0] * 18 + [4] * 18
    first = ours[1]["1F1B"][0]
    assert torch.isfinite(torch.tensor(first)).all()
    assert nn.functional.mse_loss(torch.tensor(ours[1]["split"]), torch.tensor(ours[1]["1F1B"])) < 1e-20
