"""A script with ranks as threads on devices ended in "terminate called without an active exception", in 2 runs of 5.

What autograd's threads are shown of a compute is kept in torch's own state of a thread. Torch frees it when the thread
ends, which needs the interpreter; at the end of a script, the rank's idle threads were ended while that went away.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerator.harness import require_device
from tiers import mostly_slow

SCRIPT = """
from accelerator import pretend
import torch, penstock
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
pipe = penstock.Pipeline(model, stages=4, microbatches=4, loss_fn=torch.nn.MSELoss())
x = torch.randn(16, 8)
pipe.step(x, target=x)
{}
"""


@pytest.mark.parametrize("last", mostly_slow(["pipe.close()", "", "print()"], ""))
def test_a_script_with_ranks_on_devices_ends_well(last: str) -> None:
    require_device()
    paths = [str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(last)], env=environment, capture_output=True, timeout=120
    )
    assert (done.returncode, b"terminate called" in done.stderr) == (0, False)
