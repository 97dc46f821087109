"""A script for torch's pipelining, run as by torchrun with torch's and with Penstock's: the losses are the same."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import free_port, on_processes
from torch import nn

SCRIPT = Path(__file__).parent.parent / "trains_with.py"


def as_torchrun(port: int, *arguments: str) -> None:
    """Run the script as torchrun would, in a process that has loaded torch; the script makes its own group."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()
    os.environ.update(RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the harness's to destroy


def losses_with(library: str, folder: Path) -> list[dict[str, Any]]:
    file = folder / f"{library}.json"
    on_processes(2, as_torchrun, free_port(), library, str(file))
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
