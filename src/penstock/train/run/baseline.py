"""What a rank's process takes before it has a model: Python, torch, and what training loads of other libraries.

Run as a program of its own, in a fresh process. It trains the smallest model there is for one step, because torch
loads much of itself with the first optimizer, and prints the bytes that are resident then. Ranks that `penstock train`
starts are forked from a process that has torch loaded, and of what they never use, nothing is resident in them; so
this forks as well.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

from penstock.errors import RunError


def process_bytes(libraries: list[str], forked: bool = True) -> int:
    """The bytes of a process that has loaded these libraries and has trained, without a model worth mentioning."""
    command = [sys.executable, "-m", "penstock.train.run.baseline", "forked" if forked else "alone", *libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"a process that only loads what training needs has failed: {done.stderr.strip()[-500:]}")
    return int(done.stdout.split()[-1])


def main(how: str, libraries: list[str]) -> int:
    """Load, train one step of next to nothing, and print; the exit code."""
    for name in ("penstock.train.worker", *libraries):
        importlib.import_module(name)
    if how == "forked":
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _train()
    return 0


def _train() -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch._C._distributed_c10d import HashStore

    from penstock.pipeline import Pipeline
    from penstock.train.run.progress import memory_now

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with Pipeline(layers, stages=2, microbatches=2, loss_fn=nn.functional.mse_loss, transport="threads") as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        pipe.step(torch.zeros(4, 8), target=torch.zeros(4, 8))
        optimizer.step()
    print(memory_now(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
