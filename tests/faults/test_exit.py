"""What a script ends with that does not catch anything: its error, a code that is not 0, and no process left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiers import mostly_exhaustive

SCRIPT = """
import os, signal, sys, threading, time
import torch
from torch import nn
import penstock

kind, where, victim = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
torch.set_num_threads(1)

class Trap(nn.Module):
    count = 0
    def forward(self, x):
        self.count += 1
        if self.count == 6:  # in the second step
            print("fault", time.monotonic(), flush=True)
            if kind == "raise":
                raise ValueError("boom")
            if kind == "stick":
                threading.Event().wait()
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "exit":
                sys.exit(7)
        return x

stages = [nn.Sequential(nn.Linear(4, 4), nn.Identity()) for _ in range(3)]
stages[victim][1] = Trap()
pipe = penstock.Pipeline(stages, microbatches=4, loss_fn=nn.functional.mse_loss, transport=where, timeout=2.0)
x = torch.randn(8, 4)
for step in range(4):
    pipe.step(x, target=x)
print("never", flush=True)
"""


def run(folder: Path, kind: str, where: str, victim: int = 1) -> tuple[list[int | None], list[str], float]:
    """Exit codes, what each wrote, and how long after the fault the last process ended."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for rank in range(3 if where == "distributed" else 1):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if where == "distributed":
            environment |= {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with open(folder / f"{rank}.txt", "wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(script), kind, where, str(victim)], stdout=log, stderr=log, env=environment
                )
            )
    try:
        for process in processes:
            process.wait(60)
        ended = time.monotonic()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [(folder / f"{rank}.txt").read_text() for rank in range(len(processes))]
    fault = next(float(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("fault "))
    return [process.returncode for process in processes], texts, ended - fault


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raise", "stick"])
def test_on_threads_the_script_ends_with_the_failure_also_if_a_rank_never_comes_back(tmp_path: Path, kind: str) -> None:
    codes, (text,), took = run(tmp_path, kind, "threads")
    assert codes == [1]
    assert "penstock.errors.PeerFailure: rank 1 failed" in text
    assert "what each rank was doing" in text
    assert "ValueError: boom" in text or kind == "stick"
    assert "never" not in text.splitlines()
    assert took < 30  # and not a hang: interpreter and torch end in it too, on a machine that may be busy


@pytest.mark.parametrize(
    ("kind", "victim"),
    mostly_exhaustive([("raise", 0), ("kill", 1), ("kill", 0), ("exit", 2)], ("kill", 1)),
)
def test_on_processes_every_one_ends_by_itself_with_an_error(tmp_path: Path, kind: str, victim: int) -> None:
    codes, texts, took = run(tmp_path, kind, "distributed", victim)
    expected = {"raise": 1, "kill": -9, "exit": 7}[kind]
    assert codes == [expected if rank == victim else 1 for rank in range(3)], texts
    for rank, text in enumerate(texts):
        assert "never" not in text.splitlines()
        if rank != victim:
            assert f"penstock.errors.PeerFailure: rank {victim} failed" in text
    assert took < 30
